"""Formats of quantised weights in safetensors, each in a file with the name of config.json's quant_method."""
