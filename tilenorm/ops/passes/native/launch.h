// What repeats the launches of an earlier call: allocations, and launches by CUDA's driver.
//
// No header of CUDA's is needed: the driver's two structures are declared here, and Python tells
// the addresses of its functions (see launch/driver.py, which prepares the launches).
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#ifdef WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t index, void** stream);
#endif

namespace tilenorm {

using at::Tensor;

constexpr size_t MOST_TENSORS = 64;   // that a call and its passes read and make
constexpr size_t MOST_WORDS = 256;    // arguments of a launch
constexpr uint64_t VECTOR_BYTES = 16;

struct Config {  // CUlaunchConfig. cuTile launches blocks of the shape (1, 1, 1).
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

struct Attribute {  // CUlaunchAttribute, whose value is a union of 64 bytes
  uint64_t name;
  unsigned value[16];
};

struct Driver {
  int (*queue)(const Config*, void* function, void** arguments, void**) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*enter_context)(void*) = nullptr;
};

inline Driver driver;

struct Argument {
  uint64_t bits;
  int place;  // of an address among those of a call; negative for a constant
};

struct Launch {
  void* function;
  unsigned grid[3];
  bool overlap;  // it may start before the launch before it has ended
  std::vector<Argument> arguments;
};

// A tensor to be allocated, and how a caller gets it, if that is another view of its memory.
struct Fresh {
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  bool cleared = false;  // the kernels add to it, or do not write it whole
  struct View {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
  };
  std::optional<View> shown;
};

inline Tensor allocated(const Fresh& fresh, [[maybe_unused]] at::Device device) {
#ifdef WITH_CUDA
  if (device.is_cuda()) {
    return Tensor(
        at::detail::empty_strided_cuda(fresh.sizes, fresh.strides, fresh.dtype, device));
  }
#endif
  return Tensor(at::detail::empty_strided_cpu(fresh.sizes, fresh.strides, fresh.dtype));
}

inline bool is_current(at::Device device) {
  return device.is_cpu() || c10::impl::getDeviceGuardImpl(device.type())->getDevice() == device;
}

// The launches of one pass, for tensors of one shape. It is not changed once it is made, so that
// threads use it without a lock.
struct Repeat {
  at::Device device{at::kCPU};
  void* context = nullptr;  // the device's primary context
  size_t reads = 0, results = 0;
  uint64_t strided = 0;  // bits: the tensors whose strides are those of the earlier call
  std::vector<std::optional<Fresh>> made;
  std::vector<Launch> launches;
  py::object interpreter;  // in tests: a function of the addresses, in place of the launches

  // Allocate `made`, and launch. starts: the addresses of what is read; there is room behind them.
  // False, and nothing that counts is done, where the driver has not queued every launch.
  bool run(uint64_t* starts, Tensor* made) const {
    size_t place = 0;
    for (const auto& fresh : this->made) {
      if (fresh) {
        made[place] = allocated(*fresh, device);
        if (fresh->cleared) made[place].zero_();
      }
      starts[reads + place] =
          fresh ? reinterpret_cast<uint64_t>(made[place].unsafeGetTensorImpl()->mutable_data()) : 0;
      ++place;
    }
    if (!(interpreter ? interpreted(starts) : launch(starts))) return false;
    place = 0;
    for (const auto& fresh : this->made) {
      if (fresh && fresh->shown) {  // nobody else has the tensor yet
        c10::TensorImpl* impl = made[place].unsafeGetTensorImpl();
        const auto& as = *fresh->shown;
        impl->set_storage_and_dtype(impl->storage(), c10::scalarTypeToTypeMeta(as.dtype));
        impl->set_sizes_and_strides(as.sizes, as.strides);
      }
      ++place;
    }
    return true;
  }

 private:
  bool interpreted(const uint64_t* starts) const {
    py::gil_scoped_acquire gil;
    py::list words;
    for (size_t i = 0; i < reads + made.size(); ++i) words.append(starts[i]);
    return interpreter(0, words).cast<bool>();
  }

  bool launch(uint64_t* starts) const {
    void* stream = nullptr;
#ifdef WITH_CUDA
    if (device.is_cuda() && aoti_torch_get_current_cuda_stream(device.index(), &stream)) {
      return false;
    }
#endif
    static Attribute overlapping{6, {1}};  // programmatic stream serialization is allowed
    for (bool entered = false;; entered = true) {
      int failed = 0;
      for (const Launch& each : launches) {
        void* words[MOST_WORDS];
        size_t count = 0;
        for (const Argument& argument : each.arguments) {
          const void* word = argument.place < 0 ? &argument.bits : starts + argument.place;
          words[count++] = const_cast<void*>(word);
        }
        const Config config{{each.grid[0], each.grid[1], each.grid[2]},
                            {1, 1, 1},
                            0,
                            stream,
                            each.overlap ? &overlapping : nullptr,
                            each.overlap};
        failed = driver.queue(&config, each.function, words, nullptr);
        if (failed) break;
      }
      if (!failed) return true;
      // A thread of autograd's that has called nothing of CUDA's runtime has no context.
      void* current = nullptr;
      if (entered || !context || driver.current_context(&current) || current ||
          driver.enter_context(context)) {
        return false;
      }
    }
  }
};

using RepeatPtr = std::shared_ptr<const Repeat>;

// Whether the kernels read a tensor in place, as an earlier one of its shape. Its address is noted.
inline bool starts_at(const c10::TensorImpl* t, bool strided, uint64_t& start) {
  start = reinterpret_cast<uint64_t>(t->data());
  return !(start % VECTOR_BYTES) && (strided || t->is_contiguous());
}

}  // namespace tilenorm
