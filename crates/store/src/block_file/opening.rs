//! What is done with a file when it is opened: its header checked or made anew, all descriptors read.

use super::index::Index;
use super::layout::{BLOCK, Described, Geometry, Header};
use super::{BlockFileError, WriteDisk, in_parallel, io_error, layout};
use crate::aligned::AlignedBuf;

/// Threads that read descriptors when a file is opened; more, because each read is short.
const SCANNERS: usize = 8;

/// Descriptors that a thread reads before it looks for more.
const SCAN_RUN: u32 = 32;

/// Makes the file one whose header is current and that is no longer than its bound. Says why, if blocks that
/// were there are of no use.
pub(super) fn begin(disk: &dyn WriteDisk, geometry: &Geometry) -> Result<Option<String>, BlockFileError> {
    let len = disk.len_now().map_err(|source| io_error(disk, "tell its length", source))?;
    let mut page = AlignedBuf::zeroed(BLOCK)?;
    let there = len.min(BLOCK as u64) as usize;
    disk.read_range(0, &mut page[..there])?;
    let stale = match layout::read_header(geometry, &page[..there]) {
        Header::Current => {
            let bound = geometry.offset(geometry.capacity);
            if len > bound {
                disk.set_len(bound).map_err(|source| io_error(disk, "cut it off", source))?;
            }
            return Ok(None);
        }
        Header::Foreign => return Err(BlockFileError::Foreign { file: disk.name().to_owned() }),
        Header::New => None,
        Header::Stale(why) => Some(why),
    };
    // Emptied first, so that no old descriptor stands behind the new header.
    disk.set_len(0).map_err(|source| io_error(disk, "empty it", source))?;
    page.fill(0);
    layout::write_header(geometry, &mut page);
    let file = || disk.name().to_owned();
    disk.write_all_at(0, &page).map_err(|source| BlockFileError::Write {
        file: file(),
        offset: 0,
        len: BLOCK,
        source,
    })?;
    disk.sync().map_err(|source| io_error(disk, "bring its header to the drive", source))?;
    Ok(stale)
}

/// Reads all descriptors. Returns the index and the number of slots that hold neither a block nor nothing.
pub(super) fn scan(disk: &dyn WriteDisk, geometry: &Geometry) -> Result<(Index, usize), BlockFileError> {
    let len = disk.len_now().map_err(|source| io_error(disk, "tell its length", source))?;
    let slots = len.saturating_sub(BLOCK as u64).div_ceil(geometry.slot_bytes as u64);
    let slots = u32::try_from(slots).unwrap_or(u32::MAX).min(geometry.capacity);
    let mut runs: Vec<(u32, Vec<Described>)> =
        (0..slots).step_by(SCAN_RUN as usize).map(|first| (first, Vec::new())).collect();
    in_parallel(&mut runs, SCANNERS, |(first, found)| {
        let mut page = AlignedBuf::zeroed(BLOCK).ok();
        for slot in *first..slots.min(*first + SCAN_RUN) {
            found.push(describe(disk, geometry, len, slot, page.as_deref_mut()));
        }
    });
    let mut index = Index::new(geometry.capacity);
    let mut dropped = 0;
    for described in runs.into_iter().flat_map(|(_, found)| found) {
        dropped += usize::from(described == Described::Damaged);
        index.restore(match described {
            Described::Block(descriptor) => Some(descriptor),
            Described::Nothing | Described::Damaged => None,
        });
    }
    Ok((index, dropped))
}

/// What a slot of a file of `len` bytes holds. One that cannot be read, or whose end is missing, is damaged.
fn describe(
    disk: &dyn WriteDisk,
    geometry: &Geometry,
    len: u64,
    slot: u32,
    page: Option<&mut [u8]>,
) -> Described {
    let Some(page) = page else { return Described::Damaged };
    let (start, end) = (geometry.offset(slot), geometry.offset(slot + 1));
    if end > len || disk.read_range(start, page).is_err() {
        return Described::Damaged;
    }
    layout::read_descriptor(geometry, slot, page)
}
