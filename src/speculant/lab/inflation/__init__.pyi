from .enlargement import SHAPES as SHAPES, Shape as Shape, fitting_shape as fitting_shape, named_shape as named_shape
from .kept import (
    LLAMA_50M as LLAMA_50M,
    PAIRS as PAIRS,
    decoded_model as decoded_model,
    inflated_head as inflated_head,
    inflated_model as inflated_model,
    inflated_pair as inflated_pair,
    kept_model as kept_model,
    rescaled_model as rescaled_model,
    write_pair as write_pair,
    write_rescaled as write_rescaled,
)
from .model import (
    head_kind as head_kind,
    head_shape as head_shape,
    inflate as inflate,
    inflate_head as inflate_head,
    shape_of as shape_of,
)
