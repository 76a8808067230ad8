//! What a pass asks for its weights: blocks of the trunk in the order of the schedule, experts in any
//! order of arrival. The executor sees these traits, never a file.
//!
//! Both traits lend: what they hand out borrows the source, so a lease cannot outlive the slot it
//! looks at, and a slot cannot be refilled while somebody computes from it.

use k3_kernel::{Matrix, Mxfp4};

use crate::schedule::BlockId;
pub use crate::store::StoreError;
use crate::units::{ExpertId, LayerIndex, TokenId};

/// A leased block.
#[derive(Debug)]
pub struct Block<'a> {
    /// Which rows of which matrix.
    pub id: BlockId,
    /// The rows, as a matrix of their own.
    pub matrix: Matrix<'a>,
}

/// The trunk and the head, block by block.
pub trait WeightSource: Send {
    /// Starts a pass at the first block, whatever became of the pass before. Without `head` the walk
    /// ends after the last layer.
    ///
    /// # Errors
    /// When outstanding reads of an abandoned pass failed to drain.
    fn begin_pass(&mut self, head: bool) -> Result<(), StoreError>;

    /// The next block of the pass, waiting for its read. The block before it is given back.
    ///
    /// # Errors
    /// A failed, short or unverified read, naming file and offset; a call past the last block.
    fn next_block(&mut self) -> Result<Block<'_>, StoreError>;

    /// Reads embedding rows: `out` is [ids, E].
    ///
    /// # Errors
    /// A failed or short read; an id past the vocabulary.
    fn embed(&mut self, ids: &[TokenId], out: &mut [f32]) -> Result<(), StoreError>;
}

/// One expert wanted by a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRequest {
    /// The expert.
    pub expert: ExpertId,
    /// The best router rank (0 = first choice) that any token of the pass gives it.
    pub rank: u8,
}

/// A leased expert.
#[derive(Debug)]
pub struct Expert<'a> {
    /// Its number.
    pub id: ExpertId,
    /// Gate [I, Λ].
    pub w1: Mxfp4<'a>,
    /// Down [Λ, I].
    pub w2: Mxfp4<'a>,
    /// Up [I, Λ].
    pub w3: Mxfp4<'a>,
}

/// The routed experts.
pub trait ExpertSource: Send {
    /// Asks for the distinct experts of one layer, in rank order, and starts their reads at once.
    ///
    /// # Errors
    /// When the reads cannot be issued, or the request before was not used up.
    fn request(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> Result<(), StoreError>;

    /// The next requested expert that is here, cached ones first, then in order of arrival; `None`
    /// when all have been handed out. The expert before it is given back.
    ///
    /// # Errors
    /// A failed or short read, naming file and offset.
    fn next_expert(&mut self) -> Result<Option<Expert<'_>>, StoreError>;

    /// Drops what an abandoned pass left requested.
    ///
    /// # Errors
    /// When outstanding reads failed to drain.
    fn abandon(&mut self) -> Result<(), StoreError>;
}
