from .chat import (
    ROLES as ROLES,
    TAGS as TAGS,
    TOOL_USE as TOOL_USE,
    ChatTemplate as ChatTemplate,
    ExpectedReasoning as ExpectedReasoning,
    answer_in as answer_in,
    check_roles as check_roles,
    check_variables as check_variables,
    expect_reasoning as expect_reasoning,
    find_tags as find_tags,
    find_template as find_template,
    read_messages as read_messages,
    read_template as read_template,
    up_to_mark as up_to_mark,
    with_mark as with_mark,
)
from .fim import (
    FAMILIES as FAMILIES,
    FimMarks as FimMarks,
    Hole as Hole,
    PlainEncoder as PlainEncoder,
    fim_prompt as fim_prompt,
    find_fim as find_fim,
)
from .gguf_tokenizer import (
    ROLE_KEYS as ROLE_KEYS,
    SPLITS as SPLITS,
    WordSplit as WordSplit,
    read_gguf_tokenizer as read_gguf_tokenizer,
)
from .sentencepiece import (
    BYTES as BYTES,
    SENTENCEPIECE_ROLES as SENTENCEPIECE_ROLES,
    TokenType as TokenType,
    find_sentencepiece as find_sentencepiece,
)
from .stream import (
    Beginning as Beginning,
    IncrementalDetokenizer as IncrementalDetokenizer,
    StopSearch as StopSearch,
    StopStrings as StopStrings,
    TextStream as TextStream,
    TokenOffsets as TokenOffsets,
    beginnings_of as beginnings_of,
    compile_stops as compile_stops,
)
from .text_files import (
    FilePrompt as FilePrompt,
    read_lines as read_lines,
    read_prompts as read_prompts,
    read_sequences as read_sequences,
)
from .tokenizer import (
    Tokenizer as Tokenizer,
    byte_table as byte_table,
    compare_vocabularies as compare_vocabularies,
    fallback_byte as fallback_byte,
    substitute_token as substitute_token,
    token_bytes as token_bytes,
)
from .tokenizer_bounds import (
    MOST_TIMES as MOST_TIMES,
    characters_per_token as characters_per_token,
    check_length_bounds as check_length_bounds,
)
from .user_tokenizer import UserTokenizer as UserTokenizer
