"""The controller: who holds which samples, and who may claim them. Never a tensor."""
