from .check import check_model as check_model, differences as differences
from .entries import rope_tensors as rope_tensors, start_entries as start_entries
from .folder import TYPES as TYPES, quantize as quantize, write_folder as write_folder
from .layouts import (
    LAYOUTS as LAYOUTS,
    GgufLayout as GgufLayout,
    described as described,
    stored_tensors as stored_tensors,
)
