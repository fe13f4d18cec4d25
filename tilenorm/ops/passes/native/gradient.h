// The autograd node of a call. Its backward pass takes no lock of Python's where it repeats an
// earlier one. Everything else goes to Python: backward() of ops/torch_ops/autograd.py.
#pragma once

#include "program.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <atomic>

namespace tilenorm {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);  // an intrusive_ptr from PyTorch 2.13 on

// A backward pass, for what is asked for and what arrives: a bit for each tensor that the op takes,
// and for each result.
struct Backward {
  uint32_t asked, arrived;
  Program program;
};

// What autograd needs of the calls of one kind. It is never freed, and its backward passes are only
// added, so that autograd's threads read it without a lock.
struct Recorded {
  size_t takes = 0;
  PyObject* token = nullptr;   // what Python knows of these calls
  // Their backward pass in Python: a function of the number of this object, token, asked, grads and
  // saved.
  PyObject* python = nullptr;
  std::array<std::atomic<const Backward*>, 16> backward{};

  // The program for tensors; null if there is none yet.
  const Program* of(uint32_t asked, uint32_t arrived, const c10::TensorImpl* const* given) const {
    for (const auto& each : backward) {
      const Backward* made = each.load(std::memory_order_acquire);
      if (!made) break;
      if (made->asked == asked && made->arrived == arrived && made->program.matches(given)) {
        return &made->program;
      }
    }
    return nullptr;
  }

  void add(std::unique_ptr<Backward> made) {  // under Python's lock
    for (auto& each : backward) {
      if (!each.load()) {
        each.store(made.release(), std::memory_order_release);
        return;
      }
    }
  }
};

class Gradient : public Node {
 public:
  explicit Gradient(const Recorded& call) : call_(call) {}

  void save(const Tensor* t, bool is_output) {
    if (t && t->defined()) {
      saved_.emplace_back(*t, is_output);  // a hook of saved tensors may raise
    } else {
      saved_.emplace_back();
    }
  }

  variable_list apply(variable_list&& grads) override {
    uint32_t asked = 0, arrived = 0;
    for (size_t i = 0; i < call_.takes; ++i) {
      asked |= uint32_t(task_should_compute_output(i)) << i;
    }
    for (size_t i = 0; i < grads.size(); ++i) arrived |= uint32_t(grads[i].defined()) << i;
    Tensor kept[MOST_TENSORS];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < saved_.size(); ++i) kept[i] = saved_[i].unpack(getptr());
    }
    variable_list made(call_.takes);
    if (repeated(asked, arrived, grads, kept, made)) return made;
    return by_python(asked, grads, kept);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& each : saved_) each.reset_data();
  }

  std::string name() const override { return "TilenormBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(&call_));
    args.collect(saved_, false);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& each : saved_) swap.before(each);
    variable_list made = apply(variable_list(grads));
    for (SavedVariable& each : saved_) swap.after(each);
    return made;
  }

 private:
  bool repeated(uint32_t asked, uint32_t arrived, const variable_list& grads, const Tensor* kept,
                variable_list& made) const {
    if (c10::GradMode::is_enabled() || in_a_mode()) return false;
    const Tensor* inputs[MOST_TENSORS];
    const c10::TensorImpl* impls[MOST_TENSORS];
    size_t count = 0;
    for (const Tensor& grad : grads) inputs[count++] = &grad;
    for (size_t i = 0; i < saved_.size(); ++i) inputs[count++] = kept + i;
    const auto thread = c10::impl::tls_local_dispatch_key_set();
    uint64_t keys = 0;
    for (size_t i = 0; i < count; ++i) {
      impls[i] = inputs[i]->defined() ? inputs[i]->unsafeGetTensorImpl() : nullptr;
      if (impls[i]) keys |= keys_of(impls[i], thread);  // a hook may return any tensor
    }
    if (keys & ~ordinary_keys) return false;
    const Program* program = call_.of(asked, arrived, impls);
    Tensor passes[MOST_TENSORS];
    if (!program || !program->run(impls, passes)) return false;
    for (size_t i = 0; i < call_.takes; ++i) {
      made[i] = program->given(program->gives[i], inputs, passes);
    }
    return true;
  }

  variable_list by_python(uint32_t asked, const variable_list& grads, const Tensor* kept) const {
    py::gil_scoped_acquire gil;
    const auto tuple_of = [](const Tensor* from, size_t count) {
      py::tuple tensors(count);
      for (size_t i = 0; i < count; ++i) {
        tensors[i] = from[i].defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(from[i]))
                                       : py::none();
      }
      return tensors;
    };
    py::tuple mask(call_.takes);
    for (size_t i = 0; i < call_.takes; ++i) mask[i] = py::bool_(asked >> i & 1);
    const py::tuple arrived = tuple_of(grads.data(), grads.size());
    const py::tuple saved = tuple_of(kept, saved_.size());
    const py::int_ number(reinterpret_cast<uint64_t>(&call_));
    const auto made = py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(call_.python, number.ptr(), call_.token, mask.ptr(),
                                     arrived.ptr(), saved.ptr(), nullptr));
    if (!made) {
      python_error error;
      error.persist();
      throw error;
    }
    variable_list gradients(call_.takes);
    for (size_t i = 0; i < call_.takes; ++i) {
      PyObject* each = PyTuple_GET_ITEM(made.ptr(), i);
      if (each != Py_None) gradients[i] = THPVariable_Unpack(each);
    }
    return gradients;
  }

  const Recorded& call_;
  std::vector<SavedVariable> saved_;
};

template <class Pointer>
struct NewGradient {  // from PyTorch 2.13 on
  static Pointer of(const Recorded& call) { return c10::make_intrusive<Gradient>(call); }
};

template <class Of>
struct NewGradient<std::shared_ptr<Of>> {  // a long chain of nodes is deleted without recursion
  static std::shared_ptr<Of> of(const Recorded& call) {
    return {new Gradient(call), [](Of* node) { deleteNode(node); }};
  }
};

inline NodePtr new_gradient(const Recorded& call) { return NewGradient<NodePtr>::of(call); }

}  // namespace tilenorm
