from .check import check_model as check_model, differences as differences
from .folder import TYPES as TYPES, quantize as quantize, write_folder as write_folder
from .gguf import model_entries as model_entries, read_folder as read_folder, rope_tensors as rope_tensors
