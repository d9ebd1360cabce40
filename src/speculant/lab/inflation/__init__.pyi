from .config import fitting_shape as fitting_shape
from .heads import head_kind as head_kind, head_shape as head_shape, inflate_head as inflate_head
from .kept import (
    decoded_model as decoded_model,
    inflated_model as inflated_model,
    kept_model as kept_model,
    rescaled_model as rescaled_model,
)
from .model import inflate as inflate, shape_of as shape_of
from .pair import inflated_head as inflated_head, inflated_pair as inflated_pair
from .rescaled import write_rescaled as write_rescaled
from .shapes import Shape as Shape, named_shape as named_shape
from .successors import LLAMA_50M as LLAMA_50M, write_pair as write_pair
