// A program: the passes of one direction of an op, for tensors of one kind and shape.
//
// Places count nothing first, then the program's inputs, and then the results of each pass.
#pragma once

#include "launch.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace tilenorm {

constexpr int NOTHING = 0;

inline uint64_t ordinary_keys;  // of plain tensors on the CPU and on CUDA

// The dispatch keys of a tensor, as this thread sees them: autocast, inference mode, tracing and
// the transforms of torch.func each add one.
inline uint64_t keys_of(const c10::TensorImpl* t, const c10::impl::LocalDispatchKeySet& thread) {
  return ((t->key_set() | thread.included_) - thread.excluded_).raw_repr();
}

inline bool in_a_mode() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// What a tensor has in common with that of an earlier call. Unless it is strided it was contiguous,
// and sizes of 1 may then have any stride.
struct Like {
  caffe2::TypeMeta dtype;
  at::Device device{at::kCPU};
  std::vector<int64_t> sizes, strides;
  bool strided = false, copied = false;  // copied: the passes read a contiguous copy of it

  Like(const Tensor& t, bool strided, bool copied)
      : dtype(t.dtype()),
        device(t.device()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        strided(strided),
        copied(copied) {}

  bool matches(const c10::TensorImpl* t) const {
    return t->dtype() == dtype && t->device() == device && t->sizes() == at::IntArrayRef(sizes);
  }

  bool lies_alike(const c10::TensorImpl* t) const {
    return strided ? t->strides() == at::IntArrayRef(strides) : t->is_contiguous();
  }
};

// A contiguous copy, of which autograd sees nothing.
inline Tensor copy_of(const c10::TensorImpl* t) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const at::AutoDispatchBelowADInplaceOrView below;
  return Tensor(Pointer::reclaim_copy(const_cast<c10::TensorImpl*>(t))).contiguous();
}

struct Step {
  RepeatPtr repeat;
  std::vector<int> reads;  // places
};

// An output: the place of a tensor, and the sizes that it gets, if they are others.
struct Give {
  int place;
  std::optional<std::vector<int64_t>> sizes;
};

class Program {
 public:
  std::vector<std::optional<Like>> inputs;
  std::vector<Step> steps;
  std::vector<Give> gives;

  // Whether tensors are as those for which this program was made. Null stands for an absent one.
  bool matches(const c10::TensorImpl* const* given) const {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool there = given[i] != nullptr;
      if (inputs[i].has_value() != there) return false;
      if (there && !(inputs[i]->matches(given[i]) && inputs[i]->lies_alike(given[i]))) return false;
    }
    return true;
  }

  // Run the passes on tensors that match; false, and nothing that counts is done, where the
  // kernels cannot read them in place. made: gets the results of each pass, one behind the other.
  // The scratch of a pass is let go by the next one: the stream is done with it by then.
  bool run(const c10::TensorImpl* const* given, Tensor* made) const {
    uint64_t addresses[MOST_TENSORS];
    addresses[NOTHING] = 0;
    std::vector<Tensor> copies;
    size_t end = 1;
    for (size_t i = 0; i < inputs.size(); ++i, ++end) {
      addresses[end] = 0;
      const c10::TensorImpl* t = given[i];
      if (t && inputs[i]->copied) {
        copies.push_back(copy_of(t));
        t = copies.back().unsafeGetTensorImpl();
      }
      if (t && !starts_at(t, inputs[i]->strided, addresses[end])) return false;
    }
    for (const Step& step : steps) {
      if (!is_current(step.repeat->device)) return false;
      uint64_t starts[MOST_TENSORS];
      for (size_t i = 0; i < step.reads.size(); ++i) starts[i] = addresses[step.reads[i]];
      if (!step.repeat->run(starts, made)) return false;
      const size_t results = step.repeat->results;
      std::copy_n(starts + step.reads.size(), results, addresses + end);
      end += results;
      made += results;
    }
    return true;
  }

  // What is given as an output. inputs, made: as of run.
  Tensor given(const Give& give, const Tensor* const* inputs, Tensor* made) const {
    if (give.place == NOTHING) return {};
    const size_t place = give.place - 1, first = this->inputs.size();
    if (place < first) return *inputs[place];
    Tensor& t = made[place - first];
    if (t.defined() && give.sizes) t.unsafeGetTensorImpl()->set_sizes_contiguous(*give.sizes);
    return t;
  }
};

}  // namespace tilenorm
