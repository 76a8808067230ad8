//! Why a pass ended.

use crate::model::layout;
use crate::model::tensors::MatrixKind;
use crate::schedule::BlockId;
use crate::source::StoreError;
use crate::team::TeamError;
use crate::units::{LayerIndex, TokenId};

/// Why a pass was refused or ended early.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A read failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A compute thread failed.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// Bytes that do not fit the shape they were made for.
    #[error(transparent)]
    Shape(#[from] k3_kernel::ShapeError),
    /// Somebody asked the run to stop.
    #[error("interrupted")]
    Cancelled,
    /// A pass without tokens, or a sequence of one without any.
    #[error("a pass needs at least one token of every sequence")]
    NoTokens,
    /// More tokens than the workspace was allocated for.
    #[error("a pass of {tokens} tokens, but the plan allows {max}; cut it into smaller passes")]
    PassTooLarge {
        /// Tokens asked for.
        tokens: usize,
        /// Most tokens of a pass.
        max: usize,
    },
    /// More logits than the workspace has room for.
    #[error("a pass with logits of {rows} tokens, but the plan allows {max}; cut it into smaller passes")]
    TooManyLogits {
        /// Tokens that should have logits.
        rows: usize,
        /// Most tokens with logits.
        max: usize,
    },
    /// A token that the model does not have.
    #[error("token id {id} is not in the vocabulary of {vocab} ids (0 to {})", vocab - 1)]
    UnknownToken {
        /// The id.
        id: TokenId,
        /// Ids of the model.
        vocab: usize,
    },
    /// The sequence would be longer than its context.
    #[error(
        "{have} tokens and {more} more are {} too many for a context of {context}; \
         shorten the text or raise `context.tokens` of the preset",
        (have + more).saturating_sub(*context)
    )]
    ContextFull {
        /// Tokens the sequence holds.
        have: usize,
        /// Tokens to be added.
        more: usize,
        /// Tokens it may hold.
        context: usize,
    },
    /// A draft longer than the state keeps.
    #[error("a draft of {tokens} tokens, but the plan allows {max}")]
    DraftTooLong {
        /// Tokens of the draft.
        tokens: usize,
        /// Most tokens of a draft.
        max: usize,
    },
    /// A draft waits to be committed or rejected.
    #[error("the sequence has a draft of {tokens} tokens that was neither committed nor rejected")]
    DraftPending {
        /// Its tokens.
        tokens: usize,
    },
    /// More tokens committed than the draft has.
    #[error("commit of {tokens} tokens from a draft of {draft}")]
    CommitTooLong {
        /// Tokens to commit.
        tokens: usize,
        /// Tokens of the draft.
        draft: usize,
    },
    /// The sequence's last pass ended in the middle.
    #[error("the sequence was damaged by a pass that did not finish; clear or restore it")]
    Damaged,
    /// The sequence was made for another model.
    #[error("layer {layer} of the sequence is not of the model's kind")]
    ForeignState {
        /// The layer.
        layer: LayerIndex,
    },
    /// The source lent another block than the walk needs next.
    #[error(
        "the schedule lent rows {}..{} of {}, the walk needs {} from row {row}",
        found.rows.start, found.rows.end,
        layout::matrix_name(found.layer, found.kind), layout::matrix_name(*layer, *kind)
    )]
    OutOfOrder {
        /// The matrix needed.
        kind: MatrixKind,
        /// Its layer.
        layer: Option<LayerIndex>,
        /// The row needed.
        row: usize,
        /// What came.
        found: BlockId,
    },
    /// A weight is NaN or infinite.
    #[error("{tensor}: row {row} holds a value that is not finite ({what}); the file is damaged")]
    BadWeight {
        /// Name of the tensor.
        tensor: String,
        /// Its row.
        row: usize,
        /// What was found.
        what: String,
    },
    /// A product overflowed although its weights are finite.
    #[error("{tensor}: the weights are finite, but output row {row} is not (token {column} of the pass)")]
    BadActivation {
        /// Name of the tensor.
        tensor: String,
        /// Row of the output.
        row: usize,
        /// Token, counted in the pass.
        column: usize,
    },
}
