from .bigrams import count_bigrams as count_bigrams, count_tokens as count_tokens
from .boosted.config import BoostedConfig as BoostedConfig
from .boosted.job import BoostedOutcome as BoostedOutcome
from .boosted.objective import MissedObjective as MissedObjective, known_rows as known_rows, likeliest as likeliest
from .boosted.parallel import (
    ParallelObjective as ParallelObjective,
    masked_states as masked_states,
    overlap_by_depth as overlap_by_depth,
    with_mask as with_mask,
)
from .card import Outcome as Outcome
from .checkpoint import FILE_NAME as FILE_NAME
from .config import TrainingConfig as TrainingConfig, TrainingSchedule as TrainingSchedule
from .corpus import (
    Document as Document,
    is_held_out as is_held_out,
    read_corpus as read_corpus,
    standard_library as standard_library,
)
from .evaluation import Watcher as Watcher, evaluate as evaluate, overlap as overlap
from .export import export_model as export_model
from .heads.config import HeadTrainingConfig as HeadTrainingConfig, kind_names as kind_names, load_kind as load_kind
from .heads.conversations import Turns as Turns, write_conversations as write_conversations
from .heads.distance import distances as distances, overlaps as overlaps
from .heads.job import HeadOutcome as HeadOutcome
from .heads.look_ahead import look_ahead_states as look_ahead_states
from .heads.rounds import RoundsObjective as RoundsObjective
from .heads.texts import (
    FILE as FILE,
    PART as PART,
    PartialTexts as PartialTexts,
    Texts as Texts,
    TextsPlan as TextsPlan,
    missing_states as missing_states,
    most_texts as most_texts,
    num_held_out as num_held_out,
    open_texts as open_texts,
    save_texts as save_texts,
    wanted_texts as wanted_texts,
)
from .network import hf_config as hf_config, new_network as new_network, project_embedding as project_embedding
from .objective import DistillObjective as DistillObjective, TextObjective as TextObjective
from .optimizer import Muon as Muon, Optimizer as Optimizer, orthogonalize as orthogonalize
from .output import OutputHead as OutputHead
from .passes import (
    decoded_states as decoded_states,
    encoded_sources as encoded_sources,
    hidden_states as hidden_states,
    load_plain as load_plain,
    states_of_layers as states_of_layers,
)
from .seq2seq.config import Seq2SeqConfig as Seq2SeqConfig
from .seq2seq.job import Seq2SeqOutcome as Seq2SeqOutcome
from .seq2seq.objective import (
    PairObjective as PairObjective,
    loss_of_pairs as loss_of_pairs,
    overlap_of_pairs as overlap_of_pairs,
    states_of_pairs as states_of_pairs,
)
from .seq2seq.pairs import PairBatches as PairBatches, Pairs as Pairs, read_texts as read_texts
from .tokenizer import line_starts as line_starts, train_tokenizer as train_tokenizer
from .trainer import Trainer as Trainer, TrainingReport as TrainingReport
from .windows import Windows as Windows, held_out_windows as held_out_windows
