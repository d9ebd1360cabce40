"""Text around the engine: tokenizers, chat templates, streaming decoding, stop strings."""
