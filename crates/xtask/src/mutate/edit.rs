//! Mutations: bytes, fields, blocks, whole files, and the mending of checksums.

use std::ops::Range;

use serde_json::{Value, json};
use smoe_format::expert_file::{ExpertFile, Manifest};
use smoe_format::{ModelSpec, record_crc};
use smoe_testkit::random::Random;

use super::corpus::{Base, Files};

/// A mutated vault.
pub struct Mutant {
    pub files: Files,
    /// Checksums were made to fit: what it says is then its own affair.
    pub mended: bool,
    /// For people.
    pub what: String,
}

/// Where version 3 keeps the head's checksum.
const HEAD_CRC: Range<usize> = 204..208;
/// Head of an expert file up to its tables, in version 3.
const FIXED_HEAD: usize = 256;
/// Offsets in the head.
const TABLE_OFFSET: usize = 24;
const DATA_OFFSET: usize = 32;
const CONFIG_OFFSET: usize = 216;
/// Expert table: bytes of an entry, and its checksum.
const EXPERT_BYTES: usize = 48;
const EXPERT_CRC: usize = 32;
/// No file grows beyond this.
const MAX_FILE: u64 = 16 << 20;
/// No head is planned for more experts.
const MAX_EXPERTS: usize = 20_000;

/// Draws and applies the mutation of a case.
pub fn mutate(bases: &[Base], which: usize, random: &mut Random) -> Mutant {
    let base = &bases[which];
    let mut mutant = Mutant { files: base.files.clone(), mended: false, what: base.name.clone() };
    let mend = random.below(2) == 0;
    if mend
        && base.has_checksums()
        && random.below(4) == 0
        && let Some(what) = respecify(base, &mut mutant.files, random)
    {
        mutant.what += &format!("; {what}");
        mutant.mended = true;
    }
    let edits = if mutant.mended { random.below(2) } else { [1, 1, 1, 2, 3][random.below(5)] };
    for _ in 0..edits {
        let name = choose_file(base, random);
        let what = edit(bases, base, &name, &mut mutant.files, random);
        mutant.what += &format!("; {name}: {what}");
    }
    if (mend || mutant.mended) && base.has_checksums() && mend_checksums(base, &mut mutant.files) {
        mutant.mended = true;
        mutant.what += "; checksums mended";
    }
    mutant
}

fn choose_file(base: &Base, random: &mut Random) -> String {
    let sides: Vec<_> = base.files.keys().filter(|n| **n != base.experts && **n != base.backbone).collect();
    match random.below(20) {
        0..12 => base.experts.clone(),
        12..17 => base.backbone.clone(),
        _ if sides.is_empty() => base.backbone.clone(),
        _ => sides[random.below(sides.len())].clone(),
    }
}

/// A part of a file where an edit may hit: structure far more often than weights.
fn region(base: &Base, name: &str, bytes: &[u8], random: &mut Random) -> Range<usize> {
    let cut = |range: Range<usize>| range.start.min(bytes.len())..range.end.min(bytes.len());
    if *name == base.experts {
        let data = base.head.data_offset as usize;
        let config = if base.has_checksums() { u32_at(bytes, CONFIG_OFFSET) as usize } else { data };
        match random.below(10) {
            0 => cut(0..64),
            1 => cut(64..192),
            2 => cut(192..FIXED_HEAD),
            3..6 => cut(FIXED_HEAD..config.clamp(FIXED_HEAD, data)),
            6 | 7 => cut(config.min(data)..data),
            8 => cut(data..bytes.len()),
            _ => 0..bytes.len(),
        }
    } else if *name == base.backbone {
        let header = 8 + u64_at(bytes, 0).min(bytes.len() as u64) as usize;
        match random.below(10) {
            0 | 1 => cut(0..8),
            2..8 => cut(8..header),
            _ => cut(header..bytes.len()),
        }
    } else {
        0..bytes.len()
    }
}

/// One edit; says what it did.
fn edit(bases: &[Base], base: &Base, name: &str, files: &mut Files, random: &mut Random) -> String {
    let Some(bytes) = files.get_mut(name) else { return "is gone already".to_owned() };
    let mut region = region(base, name, bytes, random);
    if region.is_empty() {
        region = 0..bytes.len();
    }
    if region.is_empty() {
        bytes.push(random.next_u64() as u8);
        return "was empty, one byte added".to_owned();
    }
    let at = region.start + random.below(region.len());
    match random.below(24) {
        0..4 => {
            let bit = random.below(8);
            bytes[at] ^= 1 << bit;
            format!("bit {bit} of byte {at} flipped")
        }
        4..7 => {
            bytes[at] = [0, 1, 0xff, 0x7f, 0x80, b'"', b'}', random.next_u64() as u8][random.below(8)];
            format!("byte {at} set to {}", bytes[at])
        }
        7..11 => set_u32(bytes, at & !3, random),
        11..14 => set_u64(bytes, at & !7, random),
        14 | 15 => set_digits(bytes, &region, at, random),
        16 => {
            let len = [at, region.start, region.end, bytes.len() - 1][random.below(4)].min(bytes.len() - 1);
            bytes.truncate(len);
            format!("cut to {len} bytes")
        }
        17 => {
            let most = [16, 512, 40_000][random.below(3)];
            let more = 1 + random.below(most);
            let fill = random.next_u64() as u8 * u8::from(random.below(2) == 0);
            bytes.resize(bytes.len() + more, fill);
            format!("{more} bytes of {fill} appended")
        }
        18 | 19 => swap(bytes, at, block(random), random),
        20 => {
            let len = block(random).min(bytes.len() - at);
            let from = random.below(bytes.len() - len + 1);
            bytes.copy_within(from..from + len, at);
            format!("{len} bytes copied from {from} to {at}")
        }
        21 | 22 => {
            let donor = &bases[random.below(bases.len())];
            let other = [&donor.experts, &donor.backbone][random.below(2)];
            let source = if name == base.backbone { &donor.backbone } else { other };
            let source_bytes = &donor.files[source];
            let same_place = random.below(2) == 0 && at < source_bytes.len();
            let from = if same_place { at } else { random.below(source_bytes.len()) };
            let len = block(random).min(source_bytes.len() - from).min(bytes.len() - at);
            bytes[at..at + len].copy_from_slice(&source_bytes[from..from + len]);
            format!("{len} bytes at {at} from {from} of {}'s {source}", donor.name)
        }
        _ => whole_file(bases, base, name, files, random),
    }
}

/// Removes a file, or replaces it by another vault's.
fn whole_file(bases: &[Base], base: &Base, name: &str, files: &mut Files, random: &mut Random) -> String {
    let donor = &bases[random.below(bases.len())];
    let source = if name == base.experts {
        donor.files.get(&donor.experts)
    } else if name == base.backbone {
        donor.files.get(&donor.backbone)
    } else {
        donor.files.get(name)
    };
    match source {
        Some(source) if random.below(3) > 0 => {
            files.insert(name.to_owned(), source.clone());
            format!("replaced by {}'s", donor.name)
        }
        _ => {
            files.remove(name);
            "removed".to_owned()
        }
    }
}

fn block(random: &mut Random) -> usize {
    [1, 4, 8, 16, 32, 48, 64, 112, 512, 4096, 16_384, 32_768][random.below(12)]
}

fn swap(bytes: &mut [u8], at: usize, len: usize, random: &mut Random) -> String {
    let len = len.min(bytes.len() / 2).max(1);
    let places = (bytes.len() / len).max(1);
    let (a, b) = (at / len % places * len, random.below(places) * len);
    if a != b {
        for i in 0..len {
            bytes.swap(a + i, b + i);
        }
    }
    format!("{len} bytes at {a} and {b} swapped")
}

fn set_u32(bytes: &mut [u8], at: usize, random: &mut Random) -> String {
    let Some(field) = bytes.get(at..at + 4) else { return format!("no u32 at {at}") };
    let old = u32::from_le_bytes([field[0], field[1], field[2], field[3]]);
    let value = match random.below(10) {
        0 => 0,
        1 => 1,
        2 => u32::MAX,
        3 => i32::MAX as u32,
        4 => 1 << 31,
        5 => old.wrapping_add(1),
        6 => old.wrapping_sub(1),
        7 => old.wrapping_mul(65_536),
        8 => 1 << random.below(32),
        _ => random.next_u64() as u32,
    };
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    format!("u32 at {at} set from {old} to {value}")
}

fn set_u64(bytes: &mut [u8], at: usize, random: &mut Random) -> String {
    if at + 8 > bytes.len() {
        return format!("no u64 at {at}");
    }
    let old = u64_at(bytes, at);
    let value = match random.below(10) {
        0 => 0,
        1 => u64::MAX,
        2 => u64::MAX - 7,
        3 => i64::MAX as u64,
        4 => old.wrapping_add(16_384),
        5 => old.wrapping_sub(16_384),
        6 => old.wrapping_sub(1),
        7 => old | 1 << 32,
        8 => 1 << random.below(64),
        _ => random.next_u64(),
    };
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    format!("u64 at {at} set from {old} to {value}")
}

/// Other digits for a number in JSON, with as many places.
fn set_digits(bytes: &mut [u8], region: &Range<usize>, at: usize, random: &mut Random) -> String {
    let digit = |i: &usize| bytes[*i].is_ascii_digit();
    let Some(start) = (at..region.end).find(digit).or_else(|| (region.start..at).find(digit)) else {
        bytes[at] = b'9';
        return format!("byte {at} set to 9");
    };
    let end = (start..bytes.len()).find(|i| !digit(i)).unwrap_or(bytes.len()).min(start + 20);
    let kind = random.below(3);
    for byte in &mut bytes[start..end] {
        *byte = match kind {
            0 => b'0',
            1 => b'9',
            _ => b'0' + random.below(10) as u8,
        };
    }
    format!("digits at {start} set to {}", String::from_utf8_lossy(&bytes[start..end]))
}

/// Gives the model one other property, throughout a head that is sound in itself; the records stay.
fn respecify(base: &Base, files: &mut Files, random: &mut Random) -> Option<String> {
    let manifest = base.head.manifest()?;
    let mut spec = serde_json::to_value(&manifest.spec).ok()?;
    let mut leaves = Vec::new();
    list_leaves(&spec, &mut String::new(), &mut leaves);
    let leaf = leaves[random.below(leaves.len())].clone();
    let value = match random.below(14) {
        0 => json!(0),
        1 => json!(1),
        2 => json!(2),
        3 => json!(3),
        4 => json!(7),
        5 => json!(1 << 20),
        6 => json!(1u64 << 40),
        7 => json!(u64::MAX),
        8 => json!(1e300),
        9 => json!(1e-300),
        10 => json!(random.below(2) == 0),
        11 => json!("moe"),
        12 => json!(random.below(4096)),
        _ => json!({ "linear": { "factor": 1e-30 } }),
    };
    let what = format!("model's {leaf} set to {value} throughout");
    // A whole branch now and then, such as another kind of RoPE scaling.
    let target =
        if random.below(4) == 0 { leaf.rsplit_once('/').map_or("", |(branch, _)| branch) } else { &leaf };
    let target = if target.is_empty() { &leaf } else { target };
    *spec.pointer_mut(target)? = value;
    let spec: ModelSpec = serde_json::from_value(spec).ok()?;
    if spec.layers.len().checked_mul(spec.moe.n_experts)? > MAX_EXPERTS {
        return None;
    }
    let encodings = base.head.layers.first()?.tensors.map(|tensor| tensor.encoding);
    let manifest = Manifest { spec, ..manifest.clone() };
    let mut head = ExpertFile::plan(manifest, |layer| {
        base.head.table(layer).map_or(encodings, |table| table.tensors.map(|tensor| tensor.encoding))
    })
    .ok()?;
    if head.file_len > MAX_FILE {
        return None;
    }
    let old = &base.files[&base.experts];
    let data = &old[base.head.data_offset as usize..];
    for record in &mut head.records {
        let found = base.head.records.iter().find(|r| r.key == record.key && r.len == record.len);
        record.crc32c = found.and_then(|r| r.crc32c).or(Some(0));
    }
    let mut bytes = head.head_bytes();
    bytes.extend_from_slice(data);
    bytes.resize(head.file_len as usize, 0);
    files.insert(base.experts.clone(), bytes);
    Some(what)
}

fn list_leaves(value: &Value, path: &mut String, leaves: &mut Vec<String>) {
    let len = path.len();
    let mut visit = |key: &str, value: &Value| {
        path.push('/');
        path.push_str(key);
        list_leaves(value, path, leaves);
        path.truncate(len);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| visit(key, value)),
        Value::Array(items) => items.iter().enumerate().for_each(|(i, value)| visit(&i.to_string(), value)),
        _ => leaves.push(path.clone()),
    }
}

/// Makes the checksums of records, listed files and head fit the mutated bytes, as a forger would; false if
/// there is no head to mend.
fn mend_checksums(base: &Base, files: &mut Files) -> bool {
    let Some(mut experts) = files.remove(&base.experts) else { return false };
    let mended = mend_in(base, files, &mut experts);
    files.insert(base.experts.clone(), experts);
    mended
}

fn mend_in(base: &Base, files: &Files, experts: &mut [u8]) -> bool {
    if experts.len() < FIXED_HEAD {
        return false;
    }
    let data = u64_at(experts, DATA_OFFSET);
    if data < FIXED_HEAD as u64 || data > experts.len() as u64 {
        return false;
    }
    let table = u64_at(experts, TABLE_OFFSET);
    for (i, record) in base.head.records.iter().enumerate() {
        let range = record.offset as usize..(record.offset + record.len) as usize;
        let entry = table.saturating_add((i * EXPERT_BYTES + EXPERT_CRC) as u64);
        if entry.saturating_add(4) > data || range.end > experts.len() {
            break;
        }
        let entry = entry as usize;
        if experts[range.clone()] != base.files[&base.experts][range.clone()] {
            let crc = record_crc(record.key, &experts[range]);
            experts[entry..entry + 4].copy_from_slice(&crc.to_le_bytes());
        }
    }
    for entry in base.head.manifest().map_or(&[][..], |manifest| &manifest.files) {
        let Some(bytes) = files.get(&entry.name) else { continue };
        let line = |bytes: u64, crc: &str| format!("\"bytes\":{bytes},\"crc32c\":\"{crc}\"");
        let old = line(entry.bytes, &entry.crc32c);
        let new = line(bytes.len() as u64, &format!("{:08x}", smoe_format::crc::crc32c(bytes)));
        let at = experts[..data as usize].windows(old.len()).position(|window| window == old.as_bytes());
        if let Some(at) = at.filter(|_| old.len() == new.len()) {
            experts[at..at + new.len()].copy_from_slice(new.as_bytes());
        }
    }
    experts[HEAD_CRC].fill(0);
    let crc = smoe_format::crc::crc32c(&experts[..data as usize]);
    experts[HEAD_CRC].copy_from_slice(&crc.to_le_bytes());
    true
}

/// The field at `at`, zero beyond the end.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.iter_mut().zip(bytes.iter().skip(at)).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(field)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u64_at(bytes, at) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::corpus::corpus;

    #[test]
    fn cases_repeat_and_mended_heads_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let bases = corpus(dir.path()).unwrap();
        let mut read = 0;
        for case in 0..300 {
            let which = case % bases.len();
            let draw = || mutate(&bases, which, &mut Random::named(9, &format!("case {case}")));
            let (mutant, again) = (draw(), draw());
            assert_eq!(mutant.what, again.what);
            assert!(mutant.files == again.files, "{}", mutant.what);
            let Some(experts) = mutant.files.get(&bases[which].experts).filter(|_| mutant.mended) else {
                continue;
            };
            let changed = *experts != bases[which].files[&bases[which].experts];
            let file_len = experts.len() as u64;
            if let Ok(len) = ExpertFile::head_len(experts, file_len) {
                match ExpertFile::parse(&experts[..len as usize], file_len) {
                    Err(smoe_format::FormatError::HeadChecksum { .. }) => panic!("{}", mutant.what),
                    Err(_) => {}
                    Ok(_) => read += usize::from(changed),
                }
            }
        }
        assert!(read > 10, "only {read} forged heads pass");
    }
}
