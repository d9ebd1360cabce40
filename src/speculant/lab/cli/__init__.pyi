from .bench_io import BenchSampling as BenchSampling
from .bench_serve import own_server as own_server
from .check_lossless import CheckedEngine as CheckedEngine, CheckedSampling as CheckedSampling
from .progress import progress_of_runs as progress_of_runs
from .train import (
    BoostedFlags as BoostedFlags,
    HeadFlags as HeadFlags,
    Seq2SeqFlags as Seq2SeqFlags,
    TrainingFlags as TrainingFlags,
    decoder_texts as decoder_texts,
)
