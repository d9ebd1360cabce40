from .bench_io import BenchSampling as BenchSampling
from .check_lossless import CheckedEngine as CheckedEngine, CheckedSampling as CheckedSampling
from .progress import progress_of_runs as progress_of_runs
from .server_process import own_server as own_server
from .train import TrainingFlags as TrainingFlags
from .train_draft import BoostedFlags as BoostedFlags
from .train_head import HeadFlags as HeadFlags
from .train_seq2seq import Seq2SeqFlags as Seq2SeqFlags
from .train_static import decoder_texts as decoder_texts
