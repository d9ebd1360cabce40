from .bigrams import count_bigrams as count_bigrams, count_tokens as count_tokens
from .config import (
    BoostedConfig as BoostedConfig,
    HeadTrainingConfig as HeadTrainingConfig,
    Seq2SeqConfig as Seq2SeqConfig,
    TrainingConfig as TrainingConfig,
    TrainingSchedule as TrainingSchedule,
    kind_names as kind_names,
    load_kind as load_kind,
)
from .corpus import (
    Document as Document,
    Windows as Windows,
    held_out_windows as held_out_windows,
    is_held_out as is_held_out,
    line_starts as line_starts,
    read_corpus as read_corpus,
    standard_library as standard_library,
    train_tokenizer as train_tokenizer,
)
from .drafts import (
    DraftRun as DraftRun,
    DraftsRun as DraftsRun,
    MissedObjective as MissedObjective,
    known_rows as known_rows,
    likeliest as likeliest,
    measure as measure,
)
from .encoder_decoders import (
    PairObjective as PairObjective,
    Seq2SeqRun as Seq2SeqRun,
    choose_tokenizer as choose_tokenizer,
    loss_of_pairs as loss_of_pairs,
    overlap_of_pairs as overlap_of_pairs,
    read_pairs as read_pairs,
    states_of_pairs as states_of_pairs,
)
from .evaluation import evaluate as evaluate, overlap as overlap
from .heads.look_ahead import look_ahead_states as look_ahead_states
from .heads.rounds import RoundsObjective as RoundsObjective
from .heads.run import HeadRun as HeadRun
from .lm import LanguageRun as LanguageRun
from .losses import (
    DistillObjective as DistillObjective,
    OutputHead as OutputHead,
    TextObjective as TextObjective,
    distances as distances,
    overlaps as overlaps,
)
from .network import (
    export_model as export_model,
    hf_config as hf_config,
    new_network as new_network,
    project_embedding as project_embedding,
)
from .optimizer import Muon as Muon, Optimizer as Optimizer, orthogonalize as orthogonalize
from .pairs import PairBatches as PairBatches, Pairs as Pairs, read_texts as read_texts
from .parallel import (
    STRIDE as STRIDE,
    ParallelObjective as ParallelObjective,
    masked_states as masked_states,
    overlap_by_depth as overlap_by_depth,
    with_mask as with_mask,
)
from .passes import (
    decoded_states as decoded_states,
    encoded_sources as encoded_sources,
    hidden_states as hidden_states,
    load_plain as load_plain,
    states_of_layers as states_of_layers,
)
from .runs import Show as Show, TrainingRun as TrainingRun, begin_folder as begin_folder
from .texts import FILE as FILE, Texts as Texts, open_texts as open_texts, save_texts as save_texts
from .trainer import FILE_NAME as FILE_NAME, Trainer as Trainer, TrainingReport as TrainingReport, Watch as Watch
from .written_texts import (
    PART as PART,
    PartialTexts as PartialTexts,
    Turns as Turns,
    most_texts as most_texts,
    wanted_texts as wanted_texts,
    write_conversations as write_conversations,
)
