//! The bytes of a block file: header and descriptors, written and read side by side.
//!
//! ```text
//! offset 0        header, one page          slot n at 4096 + n x slot bytes
//!                                           ├─ descriptor, one page
//!                                           └─ payload, padded with zeros to whole pages
//!
//! header                                    descriptor
//!    0  8  magic                               0  8  magic
//!    8  4  version                             8  8  sequence number: newer is larger
//!   16 32  fingerprint                        16 16  key
//!   48  8  payload bytes                      32 16  parent's key
//!   56  8  slot bytes                         48  4  length of the note
//! 4084  4  crc32c of what is before           52  4  crc32c of the payload
//! 4088  8  magic again                        56  n  note
//!                                           4092  4  crc32c of what is before
//! ```
//!
//! All integers are little-endian; what is not named is zero. A descriptor's checksum begins with the
//! fingerprint and the slot's number, so that one of another model or from another place is never believed.

use super::{BlockMeta, NOTE_BYTES_MAX};
use crate::block_file::error::BlockFileError;

/// What everything is a multiple of: a page of most systems, and a block of every usual drive.
pub(crate) const BLOCK: usize = 4096;

const VERSION: u32 = 1;
const HEADER_MAGIC: [u8; 8] = *b"smoeBLKF";
const DESCRIPTOR_MAGIC: [u8; 8] = *b"smoeBLKD";
const NOTE_AT: usize = 56;
const HEADER_CRC_AT: usize = BLOCK - 12;
const DESCRIPTOR_CRC_AT: usize = BLOCK - 4;

const _: () = assert!(NOTE_AT + NOTE_BYTES_MAX <= DESCRIPTOR_CRC_AT, "a note fits into its page");

/// Where slots lie, and whose they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) fingerprint: [u8; 32],
    pub(crate) payload_bytes: usize,
    /// Descriptor and padded payload.
    pub(crate) slot_bytes: usize,
    /// Slots that the bound has room for.
    pub(crate) capacity: u32,
}

impl Geometry {
    /// The slots of `payload_bytes` that fit into `max_bytes`.
    pub(crate) fn new(
        fingerprint: [u8; 32],
        payload_bytes: usize,
        max_bytes: u64,
    ) -> Result<Self, BlockFileError> {
        if payload_bytes == 0 {
            return Err(BlockFileError::Config { setting: "payload_bytes" });
        }
        let slot_bytes = payload_bytes.checked_next_multiple_of(BLOCK).and_then(|n| n.checked_add(BLOCK));
        let needed = slot_bytes.and_then(|n| n.checked_add(BLOCK)).map_or(u64::MAX, |n| n as u64);
        match slot_bytes {
            Some(slot_bytes) if needed <= max_bytes => {
                let fit = (max_bytes - BLOCK as u64) / slot_bytes as u64;
                let capacity = u32::try_from(fit).unwrap_or(u32::MAX);
                Ok(Self { fingerprint, payload_bytes, slot_bytes, capacity })
            }
            _ => Err(BlockFileError::TooSmall { max_bytes, needed }),
        }
    }

    /// First byte of a slot; for a slot that is one past the last, the end of the file.
    pub(crate) fn offset(&self, slot: u32) -> u64 {
        BLOCK as u64 + u64::from(slot) * self.slot_bytes as u64
    }

    fn descriptor_crc(&self, slot: u32, page: &[u8]) -> u32 {
        let seed =
            smoe_format::crc::crc32c_append(smoe_format::crc::crc32c(&self.fingerprint), &slot.to_le_bytes());
        smoe_format::crc::crc32c_append(seed, &page[..DESCRIPTOR_CRC_AT])
    }
}

/// What a file's first page says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// There is none, for the file is empty.
    New,
    /// The slots are ours.
    Current,
    /// A block file that is of no use, and why.
    Stale(String),
    /// No block file, so that its bytes are not ours to overwrite.
    Foreign,
}

/// Writes the header into a page of zeros.
pub(crate) fn write_header(geometry: &Geometry, page: &mut [u8]) {
    page[..8].copy_from_slice(&HEADER_MAGIC);
    page[8..12].copy_from_slice(&VERSION.to_le_bytes());
    page[16..48].copy_from_slice(&geometry.fingerprint);
    page[48..56].copy_from_slice(&(geometry.payload_bytes as u64).to_le_bytes());
    page[56..64].copy_from_slice(&(geometry.slot_bytes as u64).to_le_bytes());
    let crc = smoe_format::crc::crc32c(&page[..HEADER_CRC_AT]);
    page[HEADER_CRC_AT..HEADER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    page[BLOCK - 8..BLOCK].copy_from_slice(&HEADER_MAGIC);
}

/// Reads the header from a file's first page, or from what there is of it.
///
/// A damaged header is told from another program's file by the magic, which is there twice: one damage seldom
/// hits both ends of a page.
pub(crate) fn read_header(geometry: &Geometry, page: &[u8]) -> Header {
    let stale = |why: &str| Header::Stale(why.into());
    if page.is_empty() {
        return Header::New;
    }
    if page.iter().all(|&byte| byte == 0) {
        return stale("its header was never written");
    }
    let known = page.len().min(8);
    let begins = page[..known] == HEADER_MAGIC[..known];
    if page.len() < BLOCK {
        return if begins { stale("it ends within its header") } else { Header::Foreign };
    }
    if !begins && page[BLOCK - 8..BLOCK] != HEADER_MAGIC {
        return Header::Foreign;
    }
    if !begins || smoe_format::crc::crc32c(&page[..HEADER_CRC_AT]) != u32_at(page, HEADER_CRC_AT) {
        return stale("its header is damaged");
    }
    let (version, payload_bytes) = (u32_at(page, 8), u64_at(page, 48));
    if version != VERSION {
        return Header::Stale(format!("it has version {version}, and this program writes {VERSION}"));
    }
    if page[16..48] != geometry.fingerprint {
        return stale("it was made for another model or by another version of the program");
    }
    if payload_bytes != geometry.payload_bytes as u64 || u64_at(page, 56) != geometry.slot_bytes as u64 {
        let wanted = geometry.payload_bytes;
        return Header::Stale(format!("its blocks have {payload_bytes} bytes, and {wanted} are wanted"));
    }
    Header::Current
}

/// What is known of a block without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) sequence: u64,
    pub(crate) payload_crc: u32,
    pub(crate) meta: BlockMeta,
}

/// What a slot's first page says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Described {
    /// Zeros: the slot was never written, or was wiped.
    Nothing,
    /// Neither zeros nor a descriptor of this slot.
    Damaged,
    /// A block, if its payload is whole.
    Block(Descriptor),
}

/// Writes the descriptor of `slot` into a page of any content.
pub(crate) fn write_descriptor(geometry: &Geometry, slot: u32, descriptor: &Descriptor, page: &mut [u8]) {
    let Descriptor { sequence, payload_crc, meta } = descriptor;
    page.fill(0);
    page[..8].copy_from_slice(&DESCRIPTOR_MAGIC);
    page[8..16].copy_from_slice(&sequence.to_le_bytes());
    page[16..32].copy_from_slice(&meta.key.to_le_bytes());
    page[32..48].copy_from_slice(&meta.parent.to_le_bytes());
    page[48..52].copy_from_slice(&(meta.note.len() as u32).to_le_bytes());
    page[52..56].copy_from_slice(&payload_crc.to_le_bytes());
    page[NOTE_AT..NOTE_AT + meta.note.len()].copy_from_slice(&meta.note);
    let crc = geometry.descriptor_crc(slot, page);
    page[DESCRIPTOR_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

/// Reads the descriptor of `slot` from its page.
pub(crate) fn read_descriptor(geometry: &Geometry, slot: u32, page: &[u8]) -> Described {
    if page.iter().all(|&byte| byte == 0) {
        return Described::Nothing;
    }
    let note_len = u32_at(page, 48) as usize;
    let intact = page[..8] == DESCRIPTOR_MAGIC
        && note_len <= NOTE_BYTES_MAX
        && geometry.descriptor_crc(slot, page) == u32_at(page, DESCRIPTOR_CRC_AT);
    if !intact {
        return Described::Damaged;
    }
    let note = page[NOTE_AT..NOTE_AT + note_len].into();
    let meta = BlockMeta { key: u128_at(page, 16), parent: u128_at(page, 32), note };
    Described::Block(Descriptor { sequence: u64_at(page, 8), payload_crc: u32_at(page, 52), meta })
}

fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(page, at))
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(page, at))
}

fn u128_at(page: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(array_at(page, at))
}

fn array_at<const N: usize>(page: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| page[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new([7; 32], 5000, 1 << 20).unwrap()
    }

    fn header() -> Vec<u8> {
        let mut page = vec![0; BLOCK];
        write_header(&geometry(), &mut page);
        page
    }

    #[test]
    fn slots_are_whole_pages_within_the_bound() {
        let geometry = geometry();
        assert_eq!((geometry.slot_bytes, geometry.capacity), (3 * BLOCK, 85));
        assert_eq!((geometry.offset(0), geometry.offset(2)), (4096, 4096 + 2 * 12288));
        assert!(geometry.offset(geometry.capacity) <= 1 << 20);
        let exact = Geometry::new([7; 32], 4096, 3 * 4096).unwrap();
        assert_eq!((exact.slot_bytes, exact.capacity), (8192, 1));
        let error = Geometry::new([7; 32], 4096, 3 * 4096 - 1).unwrap_err();
        assert!(matches!(error, BlockFileError::TooSmall { needed: 12288, max_bytes: 12287 }), "{error}");
        for absurd in [usize::MAX, usize::MAX - 4096] {
            assert!(matches!(
                Geometry::new([7; 32], absurd, u64::MAX - 1),
                Err(BlockFileError::TooSmall { .. })
            ));
        }
        assert!(matches!(Geometry::new([7; 32], 0, 1 << 20), Err(BlockFileError::Config { .. })));
    }

    #[test]
    fn a_header_is_known_again_and_says_what_differs() {
        let page = header();
        assert_eq!(read_header(&geometry(), &page), Header::Current);
        let why = |geometry: Geometry| match read_header(&geometry, &page) {
            Header::Stale(why) => why,
            other => panic!("{other:?}"),
        };
        assert!(why(Geometry { fingerprint: [8; 32], ..geometry() }).contains("another model"));
        assert!(why(Geometry { payload_bytes: 4097, ..geometry() }).contains("5000"));
        let mut newer = page.clone();
        newer[8] = 2;
        let crc = smoe_format::crc::crc32c(&newer[..HEADER_CRC_AT]);
        newer[HEADER_CRC_AT..HEADER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        let Header::Stale(why) = read_header(&geometry(), &newer) else { panic!() };
        assert!(why.contains("version 2"), "{why}");
    }

    #[test]
    fn a_damaged_header_is_ours_and_another_programs_file_is_not() {
        let page = header();
        assert_eq!(read_header(&geometry(), &[]), Header::New);
        assert!(matches!(read_header(&geometry(), &[0; BLOCK]), Header::Stale(_)));
        for bit in 0..BLOCK * 8 {
            let mut damaged = page.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let found = read_header(&geometry(), &damaged);
            if bit / 8 < BLOCK - 8 {
                assert!(matches!(found, Header::Stale(_)), "bit {bit}: {found:?}");
            } else {
                assert_eq!(found, Header::Current, "the second magic only tells whose file it is");
            }
        }
        for len in 1..BLOCK {
            assert!(matches!(read_header(&geometry(), &page[..len]), Header::Stale(_)), "{len}");
        }
        for foreign in [b"A letter".repeat(512), b"x".to_vec(), vec![0xff; BLOCK], b"smoeBLKx".to_vec()] {
            assert_eq!(read_header(&geometry(), &foreign), Header::Foreign);
        }
    }

    proptest! {
        #[test]
        fn descriptors_come_back_and_damage_is_seen(
            sequence: u64, key: u128, parent: u128, payload_crc: u32, slot: u32, bit in 0..BLOCK * 8,
            note in prop::collection::vec(any::<u8>(), 0..=NOTE_BYTES_MAX),
        ) {
            let meta = BlockMeta { key, parent, note: note.into() };
            let descriptor = Descriptor { sequence, payload_crc, meta };
            let mut page = vec![0xa5; BLOCK];
            write_descriptor(&geometry(), slot, &descriptor, &mut page);
            prop_assert_eq!(
                read_descriptor(&geometry(), slot, &page),
                Described::Block(descriptor)
            );
            // Of another place or another model.
            prop_assert_eq!(read_descriptor(&geometry(), slot ^ 1, &page), Described::Damaged);
            let other = Geometry { fingerprint: [8; 32], ..geometry() };
            prop_assert_eq!(read_descriptor(&other, slot, &page), Described::Damaged);
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(read_descriptor(&geometry(), slot, &page), Described::Damaged);
            page.fill(0);
            prop_assert_eq!(read_descriptor(&geometry(), slot, &page), Described::Nothing);
        }
    }
}
