//! Where an expert lies on disk.

use smoe_format::ExpertKey;

/// An expert's bytes on disk and in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The expert.
    pub key: ExpertKey,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes on disk, read in one go.
    pub len: u32,
    /// Bytes that a lease shows: at most `len` without a decoder, what the decoder fills with one.
    pub slot_len: u32,
    /// [`smoe_format::record_crc`] over the `len` bytes on disk, if known.
    pub crc32c: Option<u32>,
}

/// The most parts in which a record is decoded.
pub const MAX_PARTS: usize = 16;

/// Turns a record as it lies on disk into what a slot shall hold; runs on the reader threads.
///
/// For older layouts that are re-tiled and for entropy-coded records. With one, reads land in a staging buffer, one
/// of a few that are used again and again; without, straight in the slot.
///
/// A record may be cut into parts, each of which fills a range of the slot. Whichever readers are free decode them, so
/// that a record which comes alone occupies all of them.
pub trait RecordDecoder: Send + Sync {
    /// Readable bytes, of any content, that `decode` wants behind a record.
    fn slack(&self) -> usize {
        0
    }

    /// Parts of the expert's record: 1 to [`MAX_PARTS`].
    fn parts(&self, _key: ExpertKey) -> usize {
        1
    }

    /// Where the `part`-th part begins in the slot; it ends where the next one begins, the last with the slot. Does not
    /// descend from part to part.
    fn start(&self, _key: ExpertKey, _part: usize) -> usize {
        0
    }

    /// Fills a part's range of the slot, `out` (contents unspecified), from `raw`: `len` bytes and
    /// [`slack`](Self::slack) bytes behind them, of which the outcome must not depend. The record's checksum has *not*
    /// been verified yet: any bytes must do. If it is wrong, or any part fails, what was decoded is never shown.
    ///
    /// # Errors
    /// Says what is wrong with `raw`; the demander gets it as [`crate::StoreError::Decode`], of several parts that of the
    /// first.
    fn decode(&self, key: ExpertKey, raw: &[u8], part: usize, out: &mut [u8]) -> Result<(), String>;
}
