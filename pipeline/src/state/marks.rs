//! Which positions of a sequence can be gone back to: bookkeeping alone, the copies lie in the layers.
//!
//! The recurrent state cannot be cut back, so copies of it are kept at marked positions. The latent
//! cache needs none: what lies before a position stays as it is.

/// Marked positions and the slots that hold their copies.
#[derive(Debug)]
pub(super) struct Marks {
    slots: Vec<Slot>,
}

/// A copy of the recurrent state of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// To be taken when a pass comes by this position.
    Wanted(usize),
    /// Taken at this position.
    Kept(usize),
}

impl Slot {
    fn position(self) -> Option<usize> {
        match self {
            Self::Free => None,
            Self::Wanted(position) | Self::Kept(position) => Some(position),
        }
    }
}

impl Marks {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![Slot::Free; slots] }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Wants a copy at `position`; gives its slot, or `None` where there is one already, or no slot at
    /// all. The first mark (the end of the instructions, as a rule) stays; of the others the one
    /// farthest back gives way.
    pub(super) fn want(&mut self, position: usize) -> Option<usize> {
        if self.slots.iter().any(|slot| slot.position() == Some(position)) {
            return None;
        }
        let free = self.slots.iter().position(|slot| *slot == Slot::Free);
        let at = free.or_else(|| {
            let mut order: Vec<usize> = (0..self.slots.len()).collect();
            order.sort_by_key(|at| self.slots[*at].position());
            order.get(1).or(order.first()).copied()
        })?;
        self.slots[at] = Slot::Wanted(position);
        Some(at)
    }

    /// The wanted position next after `from`, up to `to`, with its slot.
    pub(super) fn wanted_within(&self, from: usize, to: usize) -> Option<(usize, usize)> {
        let wanted = self.slots.iter().enumerate().filter_map(|(at, slot)| match slot {
            Slot::Wanted(position) if *position > from && *position <= to => Some((*position, at)),
            _ => None,
        });
        wanted.min()
    }

    /// Every wanted copy up to `len` has been taken.
    pub(super) fn reached(&mut self, len: usize) {
        for slot in &mut self.slots {
            if let Slot::Wanted(position) = *slot
                && position <= len
            {
                *slot = Slot::Kept(position);
            }
        }
    }

    /// Positions up to `len` were passed without a copy being taken.
    pub(super) fn missed(&mut self, len: usize) {
        for slot in &mut self.slots {
            if matches!(slot, Slot::Wanted(position) if *position <= len) {
                *slot = Slot::Free;
            }
        }
    }

    /// Forgets the marks after `len`, and wishes that were not met.
    pub(super) fn cut_back(&mut self, len: usize) {
        for slot in &mut self.slots {
            if !matches!(slot, Slot::Kept(position) if *position <= len) {
                *slot = Slot::Free;
            }
        }
    }

    /// The last position up to `limit` that was kept, with its slot.
    pub(super) fn last(&self, limit: usize) -> Option<(usize, usize)> {
        self.kept().filter(|(position, _)| *position <= limit).max()
    }

    /// All positions that were kept, with their slots.
    pub(super) fn kept(&self) -> impl Iterator<Item = (usize, usize)> {
        self.slots.iter().enumerate().filter_map(|(at, slot)| match slot {
            Slot::Kept(position) => Some((*position, at)),
            Slot::Free | Slot::Wanted(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_stays_and_the_oldest_other_gives_way() {
        let mut marks = Marks::new(3);
        for position in [10, 20, 30] {
            assert!(marks.want(position).is_some());
        }
        assert_eq!(marks.want(20), None);
        assert_eq!(marks.wanted_within(0, 25), Some((10, 0)));
        assert_eq!(marks.wanted_within(10, 25), Some((20, 1)));
        assert_eq!(marks.last(100), None);
        marks.reached(30);
        assert_eq!((marks.last(100), marks.last(29), marks.last(9)), (Some((30, 2)), Some((20, 1)), None));
        assert_eq!(marks.want(40), Some(1));
        // Wanted is not yet kept, and what it replaces is gone.
        assert_eq!(marks.last(29), Some((10, 0)));
        marks.cut_back(30);
        assert_eq!(marks.wanted_within(0, 100), None);
        let mut kept: Vec<usize> = marks.kept().map(|(position, _)| position).collect();
        kept.sort_unstable();
        assert_eq!(kept, [10, 30]);
        assert!(marks.want(50).is_some());
        marks.missed(60);
        marks.reached(60);
        assert_eq!(marks.last(100), Some((30, 2)));
        let mut one = Marks::new(1);
        assert_eq!((one.want(5), one.want(6), Marks::new(0).want(1)), (Some(0), Some(0), None));
    }
}
