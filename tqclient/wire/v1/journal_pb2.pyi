from tqclient.wire.v1 import controller_pb2 as _controller_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("open_session", "close_session", "create_partition", "seal_partition", "delete_partition", "set_metadata", "set_version", "commit", "clear", "set_tags", "claim", "settle", "reset_consumer", "requeue", "register_rank", "register_producer", "unregister_producer", "acquire_permit", "return_permit", "end_session", "expire_claim", "attach_node", "start", "dissolve_replica", "complete_ranks", "chosen_ids")
    OPEN_SESSION_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    CREATE_PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEAL_PARTITION_FIELD_NUMBER: _ClassVar[int]
    DELETE_PARTITION_FIELD_NUMBER: _ClassVar[int]
    SET_METADATA_FIELD_NUMBER: _ClassVar[int]
    SET_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    SET_TAGS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    RESET_CONSUMER_FIELD_NUMBER: _ClassVar[int]
    REQUEUE_FIELD_NUMBER: _ClassVar[int]
    REGISTER_RANK_FIELD_NUMBER: _ClassVar[int]
    REGISTER_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_PERMIT_FIELD_NUMBER: _ClassVar[int]
    RETURN_PERMIT_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_CLAIM_FIELD_NUMBER: _ClassVar[int]
    ATTACH_NODE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DISSOLVE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_RANKS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_IDS_FIELD_NUMBER: _ClassVar[int]
    open_session: _controller_pb2.OpenSessionRequest
    close_session: _controller_pb2.CloseSessionRequest
    create_partition: _controller_pb2.CreatePartitionRequest
    seal_partition: _controller_pb2.SealPartitionRequest
    delete_partition: _controller_pb2.DeletePartitionRequest
    set_metadata: _controller_pb2.SetMetadataRequest
    set_version: _controller_pb2.SetVersionRequest
    commit: _controller_pb2.CommitRequest
    clear: _controller_pb2.ClearRequest
    set_tags: _controller_pb2.SetTagsRequest
    claim: _controller_pb2.ClaimRequest
    settle: _controller_pb2.SettleRequest
    reset_consumer: _controller_pb2.ResetConsumerRequest
    requeue: _controller_pb2.RequeueRequest
    register_rank: _controller_pb2.RegisterRankRequest
    register_producer: _controller_pb2.RegisterProducerRequest
    unregister_producer: _controller_pb2.UnregisterProducerRequest
    acquire_permit: _controller_pb2.AcquirePermitRequest
    return_permit: _controller_pb2.ReturnPermitRequest
    end_session: EndSession
    expire_claim: ExpireClaim
    attach_node: _controller_pb2.NodeHello
    start: Start
    dissolve_replica: DissolveReplica
    complete_ranks: CompleteRanks
    chosen_ids: bytes
    def __init__(self, open_session: _Optional[_Union[_controller_pb2.OpenSessionRequest, _Mapping]] = ..., close_session: _Optional[_Union[_controller_pb2.CloseSessionRequest, _Mapping]] = ..., create_partition: _Optional[_Union[_controller_pb2.CreatePartitionRequest, _Mapping]] = ..., seal_partition: _Optional[_Union[_controller_pb2.SealPartitionRequest, _Mapping]] = ..., delete_partition: _Optional[_Union[_controller_pb2.DeletePartitionRequest, _Mapping]] = ..., set_metadata: _Optional[_Union[_controller_pb2.SetMetadataRequest, _Mapping]] = ..., set_version: _Optional[_Union[_controller_pb2.SetVersionRequest, _Mapping]] = ..., commit: _Optional[_Union[_controller_pb2.CommitRequest, _Mapping]] = ..., clear: _Optional[_Union[_controller_pb2.ClearRequest, _Mapping]] = ..., set_tags: _Optional[_Union[_controller_pb2.SetTagsRequest, _Mapping]] = ..., claim: _Optional[_Union[_controller_pb2.ClaimRequest, _Mapping]] = ..., settle: _Optional[_Union[_controller_pb2.SettleRequest, _Mapping]] = ..., reset_consumer: _Optional[_Union[_controller_pb2.ResetConsumerRequest, _Mapping]] = ..., requeue: _Optional[_Union[_controller_pb2.RequeueRequest, _Mapping]] = ..., register_rank: _Optional[_Union[_controller_pb2.RegisterRankRequest, _Mapping]] = ..., register_producer: _Optional[_Union[_controller_pb2.RegisterProducerRequest, _Mapping]] = ..., unregister_producer: _Optional[_Union[_controller_pb2.UnregisterProducerRequest, _Mapping]] = ..., acquire_permit: _Optional[_Union[_controller_pb2.AcquirePermitRequest, _Mapping]] = ..., return_permit: _Optional[_Union[_controller_pb2.ReturnPermitRequest, _Mapping]] = ..., end_session: _Optional[_Union[EndSession, _Mapping]] = ..., expire_claim: _Optional[_Union[ExpireClaim, _Mapping]] = ..., attach_node: _Optional[_Union[_controller_pb2.NodeHello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., dissolve_replica: _Optional[_Union[DissolveReplica, _Mapping]] = ..., complete_ranks: _Optional[_Union[CompleteRanks, _Mapping]] = ..., chosen_ids: _Optional[bytes] = ...) -> None: ...

class EndSession(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class ExpireClaim(_message.Message):
    __slots__ = ("claim_id",)
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    claim_id: int
    def __init__(self, claim_id: _Optional[int] = ...) -> None: ...

class DissolveReplica(_message.Message):
    __slots__ = ("partition_id", "consumer", "dp_rank")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    consumer: str
    dp_rank: int
    def __init__(self, partition_id: _Optional[int] = ..., consumer: _Optional[str] = ..., dp_rank: _Optional[int] = ...) -> None: ...

class CompleteRanks(_message.Message):
    __slots__ = ("partition_id", "consumer")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    consumer: str
    def __init__(self, partition_id: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
