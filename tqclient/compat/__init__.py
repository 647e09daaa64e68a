"""Other libraries' interfaces over this service: code written against them runs with another import."""
