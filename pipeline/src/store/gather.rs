//! Reads many runs of bytes through few slots, in any order of arrival.

use super::disks::Client;
use super::error::StoreError;
use super::pack::BlockChecksum;
use super::request::{Class, Pieces, Request};
use crate::memory::arena::SlotBuf;
use crate::model::tensors::Extent;

/// Reads `count` extents and hands each to `each(number, bytes)` as it arrives. All slots are back in
/// `slots` at the end, however it ends.
///
/// # Errors
/// The first failed read, or the first error of `each`; what is outstanding is withdrawn.
pub(crate) fn read_each(
    client: &mut Client,
    class: Class,
    slots: &mut Vec<SlotBuf>,
    (count, extent): (usize, impl Fn(usize) -> (Extent, Option<BlockChecksum>)),
    mut each: impl FnMut(usize, &[u8]) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    if slots.is_empty() && count > 0 {
        return Err(StoreError::NoSlot { purpose: "reads" });
    }
    let mut next = 0;
    let mut outcome = Ok(());
    loop {
        while outcome.is_ok()
            && next < count
            && let Some(slot) = slots.pop()
        {
            let (extent, checksum) = extent(next);
            let pieces = Pieces::one(extent);
            let request = Request { class, pieces, checksum, slot, tag: next as u64 };
            if let Err((slot, error)) = client.submit(request) {
                slots.push(slot);
                outcome = Err(error);
            }
            next += 1;
        }
        let Some(done) = client.wait() else { return outcome };
        if outcome.is_ok() {
            let number = done.tag as usize;
            let data = Pieces::one(extent(number).0).as_slice()[0].data();
            outcome = done.result.and_then(|()| each(number, &done.slot[data]));
            if outcome.is_err() {
                client.cancel();
            }
        }
        slots.push(done.slot);
    }
}
