//! Host memory that the device reads where it lies: no copy, no mapping.
//!
//! On memory that both share, a ring of slots that is imported is device memory; a card of its own reads it
//! across the bus. `wgpu` knows nothing of the host's writes: it takes an imported buffer for one of its own,
//! so keeping the host from what the device reads is the caller's part.
//!
//! Vulkan: `VK_EXT_external_memory_host`, asked for when the device is opened. Metal: a buffer without a copy;
//! type-checked, never run by us.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{Gpu, GpuError, Slice};

/// What imported memory belongs to: dropped when no slice, launcher or unfinished step is left that uses it.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// A long region of records, imported in pieces that bindings can address, each of whole records.
#[derive(Clone, Debug)]
pub struct Segments {
    slices: Vec<Slice>,
    record: u64,
    /// Records of each segment but the last, which may have fewer.
    each: u64,
}

impl Segments {
    /// The segments, in the order of the region.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Which segment has a record of the region, and which record of the segment it is.
    #[must_use]
    pub const fn locate(&self, record: u64) -> (usize, u64) {
        ((record / self.each) as usize, record % self.each)
    }

    /// A record of the region.
    ///
    /// # Panics
    /// If it has no such record.
    #[must_use]
    pub fn record(&self, record: u64) -> Slice {
        let (segment, at) = self.locate(record);
        self.slices[segment].part(at * self.record, self.record)
    }

    /// `count` records from `first` on, if one segment has them all.
    #[must_use]
    pub fn run(&self, first: u64, count: u64) -> Option<Slice> {
        let (segment, at) = self.locate(first);
        let slice = self.slices.get(segment)?;
        let (start, len) = (at * self.record, count * self.record);
        (count > 0 && start + len <= slice.len()).then(|| slice.part(start, len))
    }
}

/// How many records a segment of at most `most` bytes holds, whole runs of `together` if it can hold one; and the bytes
/// of each segment of `len`; None if not even one record fits.
fn cut(len: u64, record: u64, together: u64, most: u64) -> Option<(u64, impl Iterator<Item = (u64, u64)>)> {
    let each = most / record;
    let each = if each >= together { each - each % together } else { each };
    let whole = each * record;
    let starts = (0..).map(move |i| i * whole).take_while(move |start| *start < len);
    (each > 0).then(|| (each, starts.map(move |start| (start, whole.min(len - start)))))
}

impl Gpu {
    /// What the address and the length of imported memory must be multiples of.
    ///
    /// # Errors
    /// Why nothing can be imported here.
    pub fn can_import(&self) -> Result<u64, String> {
        self.import_alignment.clone()
    }

    /// Lends the `len` bytes at `memory` to the device, which reads them where they lie. Kernels may bind and
    /// steps may copy from what comes back; nothing may be written to it but by the host.
    ///
    /// From the submission of a step that reads some of the bytes until it is done, nobody should write those: the
    /// step gets some of the old and some of the new. The host may write others meanwhile; what it writes is seen by
    /// the steps that are submitted afterwards.
    ///
    /// # Errors
    /// [`GpuError::Import`] if the device cannot import, address or length is not a multiple of what
    /// [`Gpu::can_import`] says, or the driver refuses.
    ///
    /// # Safety
    /// The bytes are mapped, initialised, and stay both while `keep` lives.
    pub unsafe fn import(
        &self,
        what: &str,
        memory: NonNull<u8>,
        len: u64,
        keep: Keep,
    ) -> Result<Slice, GpuError> {
        let refused = |why| GpuError::Import { device: self.facts().to_string(), what: what.to_owned(), why };
        let align = self.can_import().map_err(refused)?;
        let (address, most) = (memory.addr().get() as u64, self.facts().max_buffer);
        if !address.is_multiple_of(align) || !len.is_multiple_of(align) || len == 0 {
            let why = format!("{len} bytes at {address:#x} are not a number of whole {align}-byte pages");
            return Err(refused(why));
        }
        if len > most {
            return Err(refused(format!("{len} bytes are more than a buffer's {most}")));
        }
        self.check()?;
        if self.is_to_refuse() {
            return Err(refused("it is made to refuse".to_owned()));
        }
        // SAFETY: the caller's promises are those that the platform asks for; address and length are aligned.
        let buffer = unsafe { platform::import(&self.device, what, memory, len, keep) }.map_err(refused)?;
        self.check()?;
        Ok(Slice { buffer, offset: 0, len })
    }

    /// Lends a region of records to the device, which reads them where they lie ([`Gpu::import`]), in as few segments as
    /// bindings allow; of each `together` records none is in another segment, if a binding can be so long.
    ///
    /// All its pages become memory at once, and stay.
    ///
    /// # Errors
    /// As [`Gpu::import`], which each segment must suit: `record` is to be a multiple of the alignment where
    /// there is more than one. [`GpuError::Binding`] if a record is longer than a binding can be.
    ///
    /// # Panics
    /// If `record` or `together` is 0, or the length not a multiple of `record`.
    pub fn lend<T>(
        &self,
        what: &str,
        region: Arc<T>,
        record: u64,
        together: u64,
    ) -> Result<Segments, GpuError>
    where
        T: AsRef<[UnsafeCell<u8>]> + Send + Sync + 'static,
    {
        let cells: &[UnsafeCell<u8>] = (*region).as_ref();
        let (memory, len) = (NonNull::from(cells).cast(), cells.len() as u64);
        let keep: Keep = region.clone();
        // SAFETY: a borrow of what the `Arc` owns is good for as long as any clone of it lives, and `keep` is one; what is
        // borrowed are initialised bytes, and cells, which may be written meanwhile.
        unsafe { self.import_segments(what, memory, len, record, together, &keep) }
    }

    /// Imports a region of records in as few segments as bindings allow.
    ///
    /// # Errors
    /// As [`Gpu::import`], which each segment must suit: `record` is to be a multiple of the alignment where
    /// there is more than one. [`GpuError::Binding`] if a record is longer than a binding can be.
    ///
    /// # Panics
    /// If `record` or `together` is 0, or `len` not a multiple of `record`.
    ///
    /// # Safety
    /// As [`Gpu::import`].
    unsafe fn import_segments(
        &self,
        what: &str,
        memory: NonNull<u8>,
        len: u64,
        record: u64,
        together: u64,
        keep: &Keep,
    ) -> Result<Segments, GpuError> {
        assert!(record > 0 && len.is_multiple_of(record), "{len} bytes of whole records of {record}");
        let most = self.facts().max_binding.min(self.facts().max_buffer);
        let Some((each, ranges)) = cut(len, record, together, most) else {
            let (device, what) = (self.facts().to_string(), what.to_owned());
            return Err(GpuError::Binding { device, what, bytes: record, most });
        };
        let slices = ranges
            .map(|(start, bytes)| {
                // SAFETY: the range lies in the caller's region, for which the promises were made.
                unsafe { self.import(what, memory.add(start as usize), bytes, keep.clone()) }
            })
            .collect::<Result<_, _>>()?;
        Ok(Segments { slices, record, each })
    }
}

/// Opens a device, able to import if the driver knows how; and the alignment of imports, or why there are none.
pub(crate) fn open(
    adapter: &wgpu::Adapter,
    desc: &wgpu::DeviceDescriptor<'_>,
) -> Result<(wgpu::Device, wgpu::Queue, Result<u64, String>), String> {
    let able = platform::alignment(adapter).and_then(|alignment| {
        let (device, queue) = platform::open(adapter, desc)?;
        Ok((device, queue, alignment))
    });
    match able {
        Ok((device, queue, alignment)) => Ok((device, queue, Ok(alignment))),
        // A device that cannot import is better than none.
        Err(why) => {
            let opened = pollster::block_on(adapter.request_device(desc));
            opened.map(|(device, queue)| (device, queue, Err(why))).map_err(|e| e.to_string())
        }
    }
}

/// What `wgpu` is told of an imported buffer.
fn descriptor(what: &str, len: u64) -> wgpu::BufferDescriptor<'_> {
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    wgpu::BufferDescriptor { label: Some(what), size: len, usage, mapped_at_creation: false }
}

#[cfg(not(target_os = "macos"))]
mod platform {
    //! `VK_EXT_external_memory_host`.

    use std::ptr::NonNull;

    use ash::ext::external_memory_host;
    use ash::vk;
    use wgpu::hal::api::Vulkan;
    use wgpu::hal::vulkan;

    use super::{Keep, descriptor};

    const HANDLE: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
    /// As [`descriptor`] says it.
    const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
        vk::BufferUsageFlags::STORAGE_BUFFER.as_raw() | vk::BufferUsageFlags::TRANSFER_SRC.as_raw(),
    );
    /// Memory in which the device sees the host's writes without further ado.
    const COHERENT: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::from_raw(
        vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw() | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw(),
    );

    pub(super) fn alignment(adapter: &wgpu::Adapter) -> Result<u64, String> {
        // SAFETY: the handles are only asked for facts, and live as long as the guard.
        unsafe {
            let hal = adapter.as_hal::<Vulkan>().ok_or("not a device of Vulkan")?;
            let known = hal.physical_device_capabilities().supports_extension(external_memory_host::NAME);
            if !known || hal.shared_instance().instance_api_version() < vk::API_VERSION_1_1 {
                return Err(format!("the driver lacks {}", external_memory_host::NAME.to_string_lossy()));
            }
            let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut host);
            let instance = hal.shared_instance().raw_instance();
            instance.get_physical_device_properties2(hal.raw_physical_device(), &mut properties);
            Ok(host.min_imported_host_pointer_alignment.max(1))
        }
    }

    pub(super) fn open(
        adapter: &wgpu::Adapter,
        desc: &wgpu::DeviceDescriptor<'_>,
    ) -> Result<(wgpu::Device, wgpu::Queue), String> {
        // SAFETY: the callback only adds an extension that the driver names (`alignment`); the device is of
        // this adapter, and opened with what `desc` asks for.
        unsafe {
            let opened = {
                let hal = adapter.as_hal::<Vulkan>().ok_or("not a device of Vulkan")?;
                let add: Box<vulkan::CreateDeviceCallback<'_>> = Box::new(|args| {
                    args.extensions.push(external_memory_host::NAME);
                });
                let (features, limits) = (desc.required_features, &desc.required_limits);
                hal.open_with_callback(features, limits, &desc.memory_hints, Some(add))
            };
            adapter
                .create_device_from_hal(opened.map_err(|e| e.to_string())?, desc)
                .map_err(|e| e.to_string())
        }
    }

    /// What an imported buffer consists of. Null handles may be destroyed, which does nothing.
    struct Imported {
        device: ash::Device,
        buffer: vk::Buffer,
        memory: vk::DeviceMemory,
        // Last: the pages go when the driver has let go of them.
        _keep: Keep,
    }

    impl Drop for Imported {
        fn drop(&mut self) {
            // SAFETY: made from this device by `import`, and owned by this value alone. It is dropped where
            // `import` failed, or by wgpu, when no unfinished step uses the buffer and the device is open still.
            unsafe {
                self.device.destroy_buffer(self.buffer, None);
                self.device.free_memory(self.memory, None);
            }
        }
    }

    /// # Safety
    /// As [`crate::Gpu::import`]; address and length are multiples of [`alignment`], the length is not 0.
    pub(super) unsafe fn import(
        device: &wgpu::Device,
        what: &str,
        memory: NonNull<u8>,
        len: u64,
        keep: Keep,
    ) -> Result<wgpu::Buffer, String> {
        let says = |call: &'static str| move |e: vk::Result| format!("{call}: {e}");
        // SAFETY: the device is open, has the extension (or `can_import` had refused), and every handle and
        // structure is of this call. The rest is the caller's promise.
        let hal_buffer = unsafe {
            let hal = device.as_hal::<Vulkan>().ok_or("not a device of Vulkan")?;
            let (raw, instance) = (hal.raw_device(), hal.shared_instance().raw_instance());
            let extension = external_memory_host::Device::new(instance, raw);
            let mut allowed = vk::MemoryHostPointerPropertiesEXT::default();
            let ask = extension.fp().get_memory_host_pointer_properties_ext;
            ask(raw.handle(), HANDLE, memory.as_ptr().cast(), &mut allowed)
                .result()
                .map_err(says("vkGetMemoryHostPointerPropertiesEXT"))?;

            let (buffer, backing) = (vk::Buffer::null(), vk::DeviceMemory::null());
            let mut imported = Imported { device: raw.clone(), buffer, memory: backing, _keep: keep };
            let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(HANDLE);
            let create = vk::BufferCreateInfo::default()
                .size(len)
                .usage(USAGE)
                .sharing_mode(vk::SharingMode::EXCLUSIVE)
                .push_next(&mut external);
            imported.buffer = raw.create_buffer(&create, None).map_err(says("vkCreateBuffer"))?;

            let needs = raw.get_buffer_memory_requirements(imported.buffer);
            if needs.size > len {
                return Err(format!("a buffer of {len} bytes needs {}", needs.size));
            }
            let types = instance.get_physical_device_memory_properties(hal.raw_physical_device());
            let fits = needs.memory_type_bits & allowed.memory_type_bits;
            let index = (0..types.memory_type_count)
                .find(|&i| {
                    let flags = types.memory_types[i as usize].property_flags;
                    fits & (1 << i) != 0 && flags.contains(COHERENT)
                })
                .ok_or("no coherent type of memory for it")?;
            let mut host = vk::ImportMemoryHostPointerInfoEXT::default()
                .handle_type(HANDLE)
                .host_pointer(memory.as_ptr().cast());
            let allocate = vk::MemoryAllocateInfo::default()
                .allocation_size(len)
                .memory_type_index(index)
                .push_next(&mut host);
            imported.memory = raw.allocate_memory(&allocate, None).map_err(says("vkAllocateMemory"))?;
            raw.bind_buffer_memory(imported.buffer, imported.memory, 0)
                .map_err(says("vkBindBufferMemory"))?;
            let buffer = imported.buffer;
            vulkan::Buffer::from_raw_externally_owned(buffer, Box::new(move || drop(imported)))
        };
        // SAFETY: made from this device, as the descriptor says; its bytes are initialised.
        Ok(unsafe { device.create_buffer_from_hal::<Vulkan>(hal_buffer, &descriptor(what, len)) })
    }
}

#[cfg(target_os = "macos")]
mod platform {
    //! `newBufferWithBytesNoCopy`. Compile-checked; never run by us.

    use std::ffi::c_void;
    use std::ptr::NonNull;
    use std::sync::{Mutex, PoisonError};

    use block2::RcBlock;
    use objc2_metal::{MTLDevice, MTLResourceOptions};
    use wgpu::hal::api::Metal;
    use wgpu::hal::metal;

    use super::{Keep, descriptor};

    /// Apple's page, and a multiple of Intel's.
    const PAGE: u64 = 16 << 10;

    pub(super) fn alignment(_: &wgpu::Adapter) -> Result<u64, String> {
        Ok(PAGE)
    }

    pub(super) fn open(
        adapter: &wgpu::Adapter,
        desc: &wgpu::DeviceDescriptor<'_>,
    ) -> Result<(wgpu::Device, wgpu::Queue), String> {
        pollster::block_on(adapter.request_device(desc)).map_err(|e| e.to_string())
    }

    /// # Safety
    /// As [`crate::Gpu::import`]; address and length are multiples of [`PAGE`], the length is not 0.
    pub(super) unsafe fn import(
        device: &wgpu::Device,
        what: &str,
        memory: NonNull<u8>,
        len: u64,
        keep: Keep,
    ) -> Result<wgpu::Buffer, String> {
        let keep = Mutex::new(Some(keep));
        // Called when the last command that uses the buffer, and wgpu, have let go of it.
        let release = RcBlock::new(move |_: NonNull<c_void>, _: usize| {
            let kept = keep.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(kept);
        });
        // SAFETY: whole pages that live until `release` is called, as the caller promises; the block owns what
        // may be sent between threads.
        let hal_buffer = unsafe {
            let hal = device.as_hal::<Metal>().ok_or("not a device of Metal")?;
            let shared = MTLResourceOptions::StorageModeShared;
            let raw = hal
                .raw_device()
                .newBufferWithBytesNoCopy_length_options_deallocator(
                    memory.cast(),
                    len as usize,
                    shared,
                    Some(&release),
                )
                .ok_or("newBufferWithBytesNoCopy refuses")?;
            metal::Device::buffer_from_raw(raw, len)
        };
        // SAFETY: made from this device, as the descriptor says; its bytes are initialised.
        Ok(unsafe { device.create_buffer_from_hal::<Metal>(hal_buffer, &descriptor(what, len)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Software;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn segments_are_whole_records_in_order_and_as_few_as_may_be(
            record in 1u64..50, count in 0u64..200, together in 1u64..9, most in 0u64..1000,
        ) {
            let len = record * count;
            let Some((each, ranges)) = cut(len, record, together, most) else {
                prop_assert!(record > most);
                return Ok(());
            };
            let ranges: Vec<_> = ranges.collect();
            let mut end = 0;
            for (i, &(start, bytes)) in ranges.iter().enumerate() {
                prop_assert_eq!(start, end);
                prop_assert!(bytes > 0 && bytes <= most && bytes % record == 0);
                prop_assert_eq!(start, i as u64 * each * record);
                end += bytes;
            }
            prop_assert_eq!(end, len);
            let fit = most / record;
            prop_assert_eq!(each % together == 0, fit >= together || fit % together == 0);
            prop_assert!(each <= fit && fit - each < together);
            prop_assert_eq!(ranges.len() as u64, count.div_ceil(each));
        }
    }

    #[test]
    fn a_device_that_cannot_import_says_why() {
        let Ok(mut gpu) = Gpu::open(None, Software::Accept) else {
            eprintln!("SKIPPED: no GPU, nor a program that plays one");
            return;
        };
        gpu.import_alignment = Err("the driver is too old".to_owned());
        // SAFETY: refused before the memory is looked at.
        let refused = unsafe { gpu.import("slots", NonNull::dangling(), 4096, Arc::new(())) };
        let error = refused.unwrap_err();
        assert!(matches!(error, GpuError::Import { .. }), "{error:?}");
        assert!(error.to_string().contains("too old") && error.to_string().contains("slots"), "{error}");
    }
}
