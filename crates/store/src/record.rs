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

/// Turns a record as it lies on disk into what a slot shall hold; runs on the reader threads.
///
/// For older layouts that are re-tiled and for entropy-coded records. With one, reads land in a staging buffer
/// of the reader, which is used again and again and so stays in its caches; without, straight in the slot.
pub trait RecordDecoder: Send + Sync {
    /// Readable bytes, of any content, that `decode` wants behind a record.
    fn slack(&self) -> usize {
        0
    }

    /// Fills `slot` (`slot_len` bytes, contents unspecified) from `raw`: `len` bytes, checksum verified, and
    /// [`slack`](Self::slack) bytes behind them, of which the outcome must not depend.
    ///
    /// # Errors
    /// Says what is wrong with `raw`; the demander gets it as [`crate::StoreError::Decode`].
    fn decode(&self, key: ExpertKey, raw: &[u8], slot: &mut [u8]) -> Result<(), String>;
}
