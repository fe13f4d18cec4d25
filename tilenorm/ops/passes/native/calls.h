// Calls of public functions that are like an earlier one: guard, passes, and autograd's node.
//
// Python makes a call first, and tells of it (remember), once what repeats its launches is
// prepared. A call that differs in anything is not served here. Calls hold Python's lock.
#pragma once

#include "gradient.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <unordered_map>

namespace tilenorm {

// A forward pass. saved: the places, among the tensors that the op takes and those that the pass
// makes, of what autograd saves; a place counts from 0.
struct Forward {
  Program program;
  std::vector<size_t> saved;
};

// A kind of calls: of one op, with the same options, of tensors of one kind and shape. Their dtypes
// and sizes choose the implementation, which makes the gradients too; strides choose a program.
struct Kind {
  PyObject *op, *eps, *backend, *asked;  // asked: a tuple
  std::vector<int64_t> normalized_shape;
  bool of_list;  // whether the shape came in a list
  struct Seen {
    PyTypeObject* type;
    uint64_t keys;
    bool requires_grad;
    Like like;
  };
  std::vector<std::optional<Seen>> tensors;
  bool records;  // whether a tensor requires a gradient
  size_t shown;  // how many of the results a user gets
  std::vector<bool> differentiable;  // for each of those
  std::string name;
  Recorded recorded;
  // Without and with the tensors of a backward pass: for tensors of other strides.
  std::vector<std::unique_ptr<const Forward>> forward[2];

  const Forward* of(bool recording, const c10::TensorImpl* const* given) const {
    for (const auto& each : forward[recording]) {
      if (each->program.matches(given)) return each.get();
    }
    return nullptr;
  }
};

inline std::unordered_multimap<uint64_t, Kind*> kinds;
inline PyTypeObject* size_type = nullptr;  // torch.Size

// What is no tensor is the same if it has one type and one value.
inline bool is_same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) return PyFloat_AS_DOUBLE(a) == PyFloat_AS_DOUBLE(b);
  if (PyUnicode_CheckExact(a)) return PyUnicode_Compare(a, b) == 0;
  return PyLong_CheckExact(a) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

inline bool is_same_shape(PyObject* shape, const Kind& kind) {
  const bool list = PyList_CheckExact(shape);
  if (!list && !PyTuple_CheckExact(shape) && Py_TYPE(shape) != size_type) return false;
  const auto& sizes = kind.normalized_shape;
  if (list != kind.of_list) return false;
  if (PySequence_Fast_GET_SIZE(shape) != static_cast<Py_ssize_t>(sizes.size())) return false;
  PyObject** items = PySequence_Fast_ITEMS(shape);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!PyLong_CheckExact(items[i]) || PyLong_AsLongLong(items[i]) != sizes[i]) return false;
  }
  return true;
}

// Tells most kinds apart. there: a bit for each tensor.
inline uint64_t mark_of(const PyObject* op, const c10::TensorImpl* x, uint64_t there) {
  constexpr uint64_t MIX = 0x9E3779B97F4A7C15ull;
  uint64_t mark = (reinterpret_cast<uint64_t>(op) ^ there) * MIX + x->dtype().itemsize();
  for (int64_t size : x->sizes()) mark = (mark ^ uint64_t(size)) * MIX;
  return mark;
}

// The tensors of a call. False where something in their place is no plain tensor.
struct Given {
  const Tensor* tensors[MOST_TENSORS];
  const c10::TensorImpl* impls[MOST_TENSORS];
  uint64_t there = 0;

  bool read(PyObject* const* objects, size_t count) {
    if (count > MOST_TENSORS / 2) return false;
    for (size_t i = 0; i < count; ++i) {
      tensors[i] = nullptr;
      impls[i] = nullptr;
      if (objects[i] == Py_None) continue;
      if (!THPVariable_CheckExact(objects[i])) return false;
      tensors[i] = &THPVariable_Unpack(objects[i]);
      impls[i] = tensors[i]->unsafeGetTensorImpl();
      there |= uint64_t(1) << i;
    }
    return true;
  }
};

inline bool matches(const Kind& kind, const Given& given, PyObject* op, PyObject* tensors,
                    PyObject* shape, PyObject* eps, PyObject* asked, PyObject* backend) {
  if (kind.op != op || kind.tensors.size() != static_cast<size_t>(PyTuple_GET_SIZE(tensors)) ||
      PyTuple_GET_SIZE(asked) != PyTuple_GET_SIZE(kind.asked)) {
    return false;
  }
  if (!is_same_shape(shape, kind) || !is_same(eps, kind.eps) || !is_same(backend, kind.backend)) {
    return false;
  }
  const auto thread = c10::impl::tls_local_dispatch_key_set();
  for (size_t i = 0; i < kind.tensors.size(); ++i) {
    const auto& seen = kind.tensors[i];
    if (seen.has_value() != (given.impls[i] != nullptr)) return false;
    if (seen && (Py_TYPE(PyTuple_GET_ITEM(tensors, i)) != seen->type ||
                 given.impls[i]->requires_grad() != seen->requires_grad ||
                 !seen->like.matches(given.impls[i]) ||
                 keys_of(given.impls[i], thread) != seen->keys)) {
      return false;
    }
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kind.asked); ++i) {
    if (!is_same(PyTuple_GET_ITEM(asked, i), PyTuple_GET_ITEM(kind.asked, i))) return false;
  }
  return true;
}

// The kind of a call, or null.
inline Kind* kind_of(const Given& given, PyObject* op, PyObject* tensors, PyObject* shape,
                     PyObject* eps, PyObject* asked, PyObject* backend) {
  const auto [first, last] = kinds.equal_range(mark_of(op, given.impls[0], given.there));
  for (auto each = first; each != last; ++each) {
    if (matches(*each->second, given, op, tensors, shape, eps, asked, backend)) {
      return each->second;
    }
  }
  return nullptr;
}

inline PyObject* as_tuple(Tensor* made, size_t count) {
  PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(count));
  if (!all) throw python_error();
  for (size_t i = 0; i < count; ++i) {  // Python's None stands for an undefined tensor
    PyTuple_SET_ITEM(all, i, THPVariable_Wrap(made[i]));
  }
  return all;
}

// What a call returns; null, and nothing is done, if it is like no earlier one.
inline PyObject* served(PyObject* op, PyObject* tensors, PyObject* shape, PyObject* eps,
                        PyObject* asked, PyObject* backend) {
  if (kinds.empty() || !PyTuple_CheckExact(tensors) || !PyTuple_CheckExact(asked)) return nullptr;
  const size_t takes = PyTuple_GET_SIZE(tensors);
  Given given;
  if (!given.read(&PyTuple_GET_ITEM(tensors, 0), takes) || !given.impls[0]) return nullptr;
  if (in_a_mode() || at::impl::torch_function_mode_enabled()) return nullptr;
  const Kind* kind = kind_of(given, op, tensors, shape, eps, asked, backend);
  if (!kind) return nullptr;
  const bool records = kind->records && c10::GradMode::is_enabled();
  const Forward* forward = kind->of(records, given.impls);
  if (!forward) return nullptr;
  RECORD_FUNCTION(kind->name, c10::ArrayRef<const c10::IValue>{},
                  static_cast<int64_t>(records ? at::sequence_number::peek() : -1));
  Tensor made[MOST_TENSORS];
  if (!forward->program.run(given.impls, made)) return nullptr;
  if (!records) return as_tuple(made, kind->shown);
  const NodePtr node = new_gradient(kind->recorded);
  torch::autograd::edge_list edges;
  edges.reserve(takes);
  for (size_t i = 0; i < takes; ++i) {
    edges.push_back(given.tensors[i] ? torch::autograd::impl::gradient_edge(*given.tensors[i])
                                     : torch::autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  const Tensor absent;
  for (size_t i = 0; i < kind->shown; ++i) {
    torch::autograd::set_history(kind->differentiable[i] ? made[i] : absent, node);
  }
  auto& gradient = static_cast<Gradient&>(*node);
  for (size_t place : forward->saved) {
    if (place < takes) {
      gradient.save(given.tensors[place], false);
    } else {
      const size_t own = place - takes;
      gradient.save(made + own, own < kind->shown && kind->differentiable[own]);
    }
  }
  return as_tuple(made, kind->shown);
}

}  // namespace tilenorm
