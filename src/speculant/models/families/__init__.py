"""The families, one file each: file name = Hugging Face model_type."""
