//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), of records, files and pages.
//!
//! Every record is checked as it arrives, between the last byte and the first product: what this takes of a streamed token
//! cannot be hidden (EXP-STORE-12).

use crc_fast::{CrcAlgorithm, Digest, checksum_combine};

const CRC32C: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// Of some bytes.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// Of bytes whose beginning has the checksum `crc` and which go on with `bytes`.
#[must_use]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // What is exchanged is the complement of the register.
    let mut digest = Digest::new_with_init_state(CRC32C, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// Of two pieces, one after the other, from the checksums of each; the second has `len` bytes.
#[must_use]
pub fn crc32c_combine(first: u32, second: u32, len: usize) -> u32 {
    checksum_combine(CRC32C, first.into(), second.into(), len as u64) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bit by bit, as the polynomial says.
    fn definition(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                let low = crc & 1;
                (crc >> 1) ^ if low == 1 { 0x82f6_3b78 } else { 0 }
            })
        })
    }

    #[test]
    fn published_values() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[]), 0);
    }

    proptest! {
        #[test]
        fn whole_appended_and_combined_are_the_definition(
            bytes in proptest::collection::vec(any::<u8>(), 0..3000),
            at in any::<prop::sample::Index>(),
        ) {
            let expected = definition(&bytes);
            let (first, second) = bytes.split_at(at.index(bytes.len() + 1));
            prop_assert_eq!(crc32c(&bytes), expected);
            prop_assert_eq!(crc32c_append(crc32c(first), second), expected);
            prop_assert_eq!(crc32c_combine(crc32c(first), crc32c(second), second.len()), expected);
        }
    }
}
