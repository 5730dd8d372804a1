//! Little-endian fields at checked offsets.

use crate::FormatError;

/// A structure's bytes, and where they lie in the file.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a> {
    pub what: &'static str,
    pub offset: u64,
    bytes: &'a [u8],
}

impl<'a> Bytes<'a> {
    /// The `len` bytes at `offset` of `file`.
    pub fn at(file: &'a [u8], what: &'static str, offset: u64, len: u64) -> Result<Self, FormatError> {
        let available = (file.len() as u64).saturating_sub(offset);
        // An empty structure beyond the end is outside, too.
        if len > available || offset > file.len() as u64 {
            return Err(FormatError::Truncated { what, offset, needed: len, available });
        }
        let start = offset as usize;
        Ok(Self { what, offset, bytes: &file[start..start + len as usize] })
    }

    pub fn slice(&self) -> &'a [u8] {
        self.bytes
    }

    pub fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(&self.bytes[at..at + N]);
        array
    }

    pub fn u8(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.array(at))
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }

    pub fn f32(&self, at: usize) -> f32 {
        f32::from_le_bytes(self.array(at))
    }

    /// The error for a field of this structure.
    pub fn bad(&self, what: &'static str, found: impl ToString, rule: impl Into<String>) -> FormatError {
        FormatError::Field { what, offset: self.offset, found: found.to_string(), rule: rule.into() }
    }

    /// Reserved bytes must be zero: a writer that uses them means something that this build does not know.
    pub fn zero(&self, range: std::ops::Range<usize>) -> Result<(), FormatError> {
        let reserved = &self.bytes[range];
        if reserved.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        Err(self.bad("reserved field", format!("{reserved:02x?}"), "0 is known"))
    }

    pub fn magic(&self, magic: &[u8]) -> Result<(), FormatError> {
        if self.bytes[..magic.len()] == *magic {
            return Ok(());
        }
        let found = self.bytes[..magic.len()].to_vec();
        Err(FormatError::Magic { what: self.what, offset: self.offset, found })
    }
}

/// Appends fields.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
