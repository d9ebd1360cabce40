"""Decoders of several families over one cache interface: file name = Hugging Face model_type."""
