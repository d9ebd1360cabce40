from .config import (
    BoostedConfig as BoostedConfig,
    HeadTrainingConfig as HeadTrainingConfig,
    Seq2SeqConfig as Seq2SeqConfig,
    TrainingConfig as TrainingConfig,
    TrainingSchedule as TrainingSchedule,
)
from .corpus import (
    Document as Document,
    Windows as Windows,
    count_bigrams as count_bigrams,
    count_tokens as count_tokens,
    held_out_windows as held_out_windows,
    is_held_out as is_held_out,
    line_starts as line_starts,
    read_corpus as read_corpus,
    standard_library as standard_library,
    train_tokenizer as train_tokenizer,
)
from .drafts import (
    STRIDE as STRIDE,
    DraftRun as DraftRun,
    DraftsRun as DraftsRun,
    MissedObjective as MissedObjective,
    ParallelObjective as ParallelObjective,
    known_rows as known_rows,
    likeliest as likeliest,
    masked_states as masked_states,
    measure as measure,
    overlap_by_depth as overlap_by_depth,
    with_mask as with_mask,
)
from .heads import (
    KINDS as KINDS,
    HeadRun as HeadRun,
    RoundsObjective as RoundsObjective,
    look_ahead_states as look_ahead_states,
)
from .lm import LanguageRun as LanguageRun
from .losses import (
    DistillObjective as DistillObjective,
    OutputHead as OutputHead,
    TextObjective as TextObjective,
    distances as distances,
    evaluate as evaluate,
    overlap as overlap,
    overlaps as overlaps,
)
from .network import (
    CausalTexts as CausalTexts,
    decoded_states as decoded_states,
    encoded_sources as encoded_sources,
    export_model as export_model,
    hf_config as hf_config,
    hidden_states as hidden_states,
    load_plain as load_plain,
    new_network as new_network,
    project_embedding as project_embedding,
    states_of_layers as states_of_layers,
)
from .seq2seq import (
    PairBatches as PairBatches,
    PairObjective as PairObjective,
    Pairs as Pairs,
    Seq2SeqRun as Seq2SeqRun,
    loss_of_pairs as loss_of_pairs,
    overlap_of_pairs as overlap_of_pairs,
    read_pairs as read_pairs,
    read_texts as read_texts,
    states_of_pairs as states_of_pairs,
)
from .target_texts import (
    FILE as FILE,
    PART as PART,
    PartialTexts as PartialTexts,
    Texts as Texts,
    Turns as Turns,
    most_texts as most_texts,
    open_texts as open_texts,
    save_texts as save_texts,
    wanted_texts as wanted_texts,
    write_conversations as write_conversations,
)
from .trainer import (
    FILE_NAME as FILE_NAME,
    Muon as Muon,
    Optimizer as Optimizer,
    Show as Show,
    Trainer as Trainer,
    TrainingReport as TrainingReport,
    TrainingRun as TrainingRun,
    Watch as Watch,
    begin_folder as begin_folder,
    orthogonalize as orthogonalize,
)
