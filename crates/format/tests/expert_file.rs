//! Header and tables: written, read back, and damaged in every way.

use proptest::prelude::*;
use smoe_format::expert_file::{Architecture, FileEntry, Manifest, Provenance};
use smoe_format::spec::{
    AttentionSpec, FfnKind, ModelSpec, MoeSpec, Multipliers, RopeScaling, RopeSpec, RouterKind,
};
use smoe_format::{
    Backbone, Encoding, ExpertFile, ExpertKey, FormatError, RECORD_ALIGN, Table, Uniform, Zero, record_crc,
};

fn spec() -> ModelSpec {
    ModelSpec {
        model_type: "qwen3_moe".to_owned(),
        d_model: 96,
        vocab_size: 300,
        max_context: 512,
        rms_norm_eps: 1e-6,
        tied_head: false,
        attention: AttentionSpec {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 16,
            qk_norm: true,
            ..Default::default()
        },
        rope: RopeSpec {
            theta: 1e6,
            scaling: RopeScaling::Yarn {
                factor: 4.0,
                original_context: 128,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 1.138_629_436_111_989,
                truncate: true,
            },
            ..Default::default()
        },
        layers: vec![FfnKind::Dense(80), FfnKind::Moe, FfnKind::Moe],
        windows: Vec::new(),
        mixers: Vec::new(),
        delta: None,
        multipliers: Multipliers::default(),
        moe: MoeSpec {
            n_experts: 5,
            top_k: 2,
            d_expert: 40,
            router: RouterKind::Softmax,
            norm_topk: true,
            d_shared: 0,
            ..Default::default()
        },
    }
}

/// Every kind of encoding is in it: uniform codes, two level tables, floats.
fn planned() -> ExpertFile {
    let q = |bits| Encoding::Uniform(Uniform::new(bits, 64, Zero::Symmetric).expect("valid"));
    let table = Table::new(3, 128, &[-100, -40, -12, 0, 0, 13, 41, 127]).expect("valid");
    let manifest = Manifest {
        spec: spec(),
        source: Provenance { fingerprint: "f".to_owned(), settings: "s".to_owned() },
        files: vec![FileEntry::new("backbone.safetensors", 1234, 0)],
    };
    ExpertFile::plan(manifest, |layer| match layer {
        1 => [q(4), Encoding::Table(Table::MXFP4), q(6)],
        _ => [Encoding::Bf16, Encoding::Bf16, Encoding::Table(table)],
    })
    .expect("small")
}

/// A head with the checksum that its bytes have now.
fn mended(mut head: Vec<u8>) -> Vec<u8> {
    head[204..208].fill(0);
    let crc = smoe_format::crc::crc32c(&head);
    head[204..208].copy_from_slice(&crc.to_le_bytes());
    head
}

#[test]
fn a_head_reads_back_as_it_was_planned() {
    let mut file = planned();
    for (i, record) in file.records.iter_mut().enumerate() {
        record.crc32c = Some(i as u32 * 77);
    }
    let head = file.head_bytes();
    assert_eq!(head.len() as u64, file.data_offset);
    assert!(file.records.iter().all(|r| r.offset.is_multiple_of(RECORD_ALIGN as u64)));
    assert_eq!(ExpertFile::head_len(&head, file.file_len).expect("head"), file.data_offset);
    assert_eq!(ExpertFile::parse(&head, file.file_len).expect("parse"), file);
}

/// Two MoE layers alike, with the records of one.
fn shared() -> ExpertFile {
    let Architecture::Manifest(manifest) = planned().architecture else { unreachable!("version 3") };
    ExpertFile::plan_shared(*manifest, |_| [Encoding::Bf16; 3], 1).expect("small")
}

#[test]
fn layers_may_have_the_same_records_if_they_are_built_alike() {
    let file = shared();
    assert_eq!(file.records[0].offset, file.records[5].offset);
    assert_eq!(file.file_len, file.data_offset + file.records[..5].iter().map(|r| r.len).sum::<u64>());
    assert_eq!(ExpertFile::parse(&file.head_bytes(), file.file_len).expect("parse"), file);

    let Architecture::Manifest(manifest) = planned().architecture else { unreachable!("version 3") };
    let mixed = |layer| [if layer == 1 { Encoding::Bf16 } else { Encoding::F32 }; 3];
    assert!(ExpertFile::plan_shared(*manifest, mixed, 1).is_err());
}

#[test]
fn records_never_overlap_in_part_nor_leave_gaps() {
    let refused = |file: &ExpertFile| {
        let parsed = ExpertFile::parse(&file.head_bytes(), file.file_len);
        assert!(matches!(parsed, Err(FormatError::Record { .. })), "{parsed:?}");
    };
    // One expert of another place than its layer's others.
    for (expert, as_expert) in [(5, 1), (6, 0), (7, 8), (9, 4)] {
        let mut file = shared();
        if file.records[expert].offset == file.records[as_expert].offset {
            file.records[expert].offset += RECORD_ALIGN as u64;
        } else {
            file.records[expert].offset = file.records[as_expert].offset;
        }
        refused(&file);
    }
    // A whole layer that begins within another.
    let mut file = shared();
    let len = file.records[0].len;
    file.records[5..].iter_mut().for_each(|record| record.offset += len);
    refused(&file);
    // The records of a layer that is coded otherwise.
    let mut file = planned();
    let first: Vec<u64> = file.records[..5].iter().map(|record| record.offset).collect();
    file.records[5..].iter_mut().zip(first).for_each(|(record, offset)| record.offset = offset);
    refused(&file);
}

#[test]
fn the_heads_length_does_not_depend_on_checksums() {
    let mut file = planned();
    let before = file.head_bytes().len();
    for record in &mut file.records {
        record.crc32c = Some(u32::MAX);
    }
    if let Architecture::Manifest(manifest) = &mut file.architecture {
        manifest.files[0] = FileEntry::new("backbone.safetensors", 1234, u32::MAX);
    }
    assert_eq!(file.head_bytes().len(), before);
}

#[test]
fn every_flipped_byte_of_a_head_is_noticed() {
    let file = planned();
    let head = file.head_bytes();
    for at in 0..head.len() {
        let mut damaged = head.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(ExpertFile::parse(&damaged, file.file_len).is_err(), "byte {at}");
    }
    for len in [0, 7, 63, 64, 255, head.len() - 1] {
        assert!(ExpertFile::parse(&head[..len], file.file_len).is_err(), "cut to {len}");
    }
    let short = ExpertFile::parse(&head, file.file_len - 1);
    assert!(matches!(short, Err(FormatError::Truncated { .. })), "{short:?}");
}

#[test]
fn records_swapped_or_moved_have_another_checksum() {
    let key = |layer, expert| ExpertKey { layer, expert };
    let bytes = [7; 64];
    assert_ne!(record_crc(key(0, 1), &bytes), record_crc(key(1, 0), &bytes));
    assert_ne!(record_crc(key(0, 1), &bytes), record_crc(key(0, 2), &bytes));
}

/// The entry of MXFP4 is written as in FORMAT.md 2.4, and no field of a table's entry may say anything else.
#[test]
fn the_entry_of_a_level_table_is_read_strictly() {
    let file = planned();
    let head = file.head_bytes();
    let entry = [
        4, 4, 1, 0, 32, 0, 1, 0, 0, 1, 2, 3, 4, 6, 8, 12, 0, 0xff, 0xfe, 0xfd, 0xfc, 0xfa, 0xf8, 0xf4, 0, 0,
        0, 0, 0, 0, 0, 0,
    ];
    let (mxfp4, fitted) = (256 + 32, 256 + 4 * 32);
    assert_eq!(head[mxfp4..mxfp4 + 32], entry);
    assert_eq!(head[fitted..fitted + 8], [4, 3, 1, 0, 128, 0, 1, 0]);
    let refused = |at: usize, value: u8| {
        let mut head = head.clone();
        head[at] = value;
        matches!(
            ExpertFile::parse(&mended(head), file.file_len),
            Err(FormatError::Field { what: "encoding", .. })
        )
    };
    // Five bits, another scale, a zero of its own, a group that is none, another layout.
    for (at, value) in [(1, 5), (2, 0), (3, 2), (4, 48), (6, 2)] {
        assert!(refused(mxfp4 + at, value), "byte {at}");
    }
    assert!((8..24).all(|at| refused(mxfp4 + at, 0x80)), "a level of -128");
    assert!((24..32).all(|at| refused(mxfp4 + at, 1)), "a byte past the levels");
    assert!((16..32).all(|at| refused(fitted + at, 1)), "a ninth level of three bits");
}

#[test]
fn a_backbone_tensor_that_claims_a_level_table_is_refused_by_name() {
    let json = r#"{"__metadata__":{"embed":"mxfp4/32 32x32"},"embed":{"dtype":"U8","shape":[576],"data_offsets":[0,576]}}"#;
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    let error =
        Backbone::parse(&file, file.len() as u64 + 576).expect_err("a label has no levels").to_string();
    assert!(error.contains("embed") && error.contains("only routed experts"), "{error}");
    for table in [Table::MXFP4, Table::IQ4_NL, Table::new(2, 64, &[0; 4]).expect("valid")] {
        assert!(table.to_string().parse::<Encoding>().is_err());
    }
}

proptest! {
    /// With the checksum mended after the damage, parsing still ends in a value or a typed error: no panic,
    /// no endless loop, no allocation that the head's own length does not bound.
    #[test]
    fn a_hostile_head_with_a_right_checksum_never_panics(
        edits in prop::collection::vec((0usize..4096, any::<u8>()), 1..12),
        file_len in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
    ) {
        let file = planned();
        let mut head = file.head_bytes();
        for (at, value) in edits {
            let at = at % head.len();
            head[at] = value;
        }
        let _ = ExpertFile::parse(&mended(head), file_len.unwrap_or(file.file_len));
    }

    /// The same for heads of the original's versions, which have no checksum at all.
    #[test]
    fn a_hostile_original_head_never_panics(
        version in 1u32..3,
        bytes in prop::collection::vec(any::<u8>(), 64..1024),
        counts in (0u32..6, 0u32..6),
    ) {
        let mut head = planned().head_bytes()[..8].to_vec();
        head.extend_from_slice(&bytes);
        head[8..12].copy_from_slice(&version.to_le_bytes());
        head[12..16].copy_from_slice(&counts.0.to_le_bytes());
        head[16..20].copy_from_slice(&counts.1.to_le_bytes());
        head[20..24].copy_from_slice(&(counts.0 * counts.1).to_le_bytes());
        head[24..32].copy_from_slice(&64u64.to_le_bytes());
        let len = head.len() as u64;
        head[32..40].copy_from_slice(&len.to_le_bytes());
        let _ = ExpertFile::parse(&head, 1 << 20);
    }
}

/// The planned file with entropy-coded records of some lengths.
fn coded() -> ExpertFile {
    let mut file = planned();
    let used: Vec<u64> = (0..file.records.len() as u64).map(|i| 64 + 1777 * i).collect();
    file.set_coded(&used);
    file
}

#[test]
fn coded_records_have_lengths_of_their_own() {
    let file = coded();
    let head = file.head_bytes();
    assert_eq!(head.len() as u64, file.data_offset);
    assert_eq!(ExpertFile::parse(&head, file.file_len).expect("parse"), file);
    assert_eq!(file.longest_record(), 16384);
    // A layer may have all the records of one before that is like it, of whatever lengths.
    let mut shared = shared();
    let half = shared.records.len() / 2;
    let used: Vec<u64> = (0..shared.records.len() as u64).map(|i| 64 + 977 * (i % half as u64)).collect();
    shared.set_coded(&used);
    let (first, second) = shared.records.split_at_mut(half);
    for (twin, record) in first.iter().zip(second) {
        record.offset = twin.offset;
    }
    shared.file_len = shared.records[half - 1].offset + shared.records[half - 1].len;
    assert_eq!(ExpertFile::parse(&shared.head_bytes(), shared.file_len).expect("parse"), shared);
    shared.records[half].used += 1;
    assert!(ExpertFile::parse(&shared.head_bytes(), shared.file_len).is_err());
}

#[test]
fn coded_records_of_impossible_lengths_are_refused() {
    for (used, len) in
        [(63, 16384), (64, 0), (64, 32768), (16385, 16384), (1 << 40, 1 << 40), (u64::MAX, 16384)]
    {
        let mut file = coded();
        file.records[2].used = used;
        file.records[2].len = len;
        let shift = |end: u64, r: &mut smoe_format::RecordEntry| {
            r.offset = end;
            end.saturating_add(r.len)
        };
        let end = file.records.iter_mut().fold(file.data_offset, shift);
        file.file_len = end;
        let error = ExpertFile::parse(&file.head_bytes(), end).expect_err("refused");
        assert!(matches!(error, FormatError::Record { .. }), "{used} {len}: {error}");
    }
    // Without the flag, only one length is right.
    let mut plain = coded();
    plain.coded = false;
    assert!(ExpertFile::parse(&plain.head_bytes(), plain.file_len).is_err());
}
