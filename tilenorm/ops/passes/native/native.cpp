// What Python sees of the fast path of a call: see README.md in this folder.

#include "calls.h"

namespace tilenorm {
namespace {

constexpr const char* REPEAT = "tilenorm.repeat";
constexpr const char* GENERATED = "tilenorm.generated";
constexpr size_t MOST_PROGRAMS = 256;  // of a function that Inductor's code calls

// ------------------------------------------------- functions in Python that are objects of this file

template <class Of>
PyObject* function_of(std::unique_ptr<Of> object, PyMethodDef* definition, const char* kind) {
  PyObject* capsule = PyCapsule_New(object.release(), kind, [](PyObject* self) {
    delete static_cast<Of*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
  });
  if (!capsule) throw python_error();
  PyObject* function = PyCFunction_New(definition, capsule);
  Py_DECREF(capsule);
  if (!function) throw python_error();
  return function;
}

template <class Of>
Of& object_of(PyObject* self, const char* kind) {
  auto* object = static_cast<Of*>(PyCapsule_GetPointer(self, kind));
  if (!object) throw python_error();
  return *object;
}

template <class Of>
Of& object_of(const py::handle& function, const char* kind) {
  TORCH_CHECK_TYPE(PyCFunction_Check(function.ptr()), "tilenorm: takes a function of its own");
  return object_of<Of>(PyCFunction_GET_SELF(function.ptr()), kind);
}

// repeat(tensors) -> results, or None where they lie otherwise than those of the earlier call
PyObject* call_repeat(PyObject* self, PyObject* tensors) {
  HANDLE_TH_ERRORS
  const Repeat& repeat = *object_of<RepeatPtr>(self, REPEAT);
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(tensors, "takes a tuple"));
  if (!items) throw python_error();
  Given given;
  const size_t count = PySequence_Fast_GET_SIZE(items.ptr());
  if (count != repeat.reads || !given.read(PySequence_Fast_ITEMS(items.ptr()), count) ||
      !is_current(repeat.device)) {
    Py_RETURN_NONE;
  }
  uint64_t starts[MOST_TENSORS];
  for (size_t i = 0; i < count; ++i) {
    starts[i] = 0;
    if (given.impls[i] && !starts_at(given.impls[i], repeat.strided >> i & 1, starts[i])) {
      Py_RETURN_NONE;
    }
  }
  Tensor made[MOST_TENSORS];
  if (!repeat.run(starts, made)) Py_RETURN_NONE;
  return as_tuple(made, repeat.results);
  END_HANDLE_TH_ERRORS
}

PyMethodDef repeat_definition{"repeat", call_repeat, METH_O, nullptr};

// What Inductor's code calls: the programs of the shapes that came so far, and the function in
// Python that serves every call.
struct Generated {
  py::object python;
  std::vector<std::unique_ptr<const Program>> programs;
};

PyObject* call_generated(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Generated& generated = object_of<Generated>(self, GENERATED);
  Given given;
  if (given.read(args, count) && !in_a_mode()) {
    for (const auto& each : generated.programs) {
      const Program* program = each.get();  // the list may grow while a program runs
      if (program->inputs.size() != static_cast<size_t>(count) || !program->matches(given.impls)) {
        continue;
      }
      Tensor made[MOST_TENSORS];
      if (!program->run(given.impls, made)) break;
      const size_t outputs = program->gives.size();
      Tensor results[MOST_TENSORS];
      for (size_t i = 0; i < outputs; ++i) {
        results[i] = program->given(program->gives[i], given.tensors, made);
      }
      return as_tuple(results, outputs);
    }
  }
  return PyObject_Vectorcall(generated.python.ptr(), args, count, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef generated_definition{
    "generated", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_generated)),
    METH_FASTCALL, nullptr};

// served(op, tensors, normalized_shape, eps, asked, backend) -> results, or None
PyObject* call_served(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "tilenorm: served takes 6 arguments");
  PyObject* made = served(args[0], args[1], args[2], args[3], args[4], args[5]);
  if (made) return made;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef served_definition{
    "served", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_served)),
    METH_FASTCALL, nullptr};

// ------------------------------------------------------------------------ what Python has prepared

std::vector<int64_t> sizes_of(const py::handle& sizes) { return sizes.cast<std::vector<int64_t>>(); }

at::ScalarType dtype_of(const py::handle& dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

Launch launch_of(const py::handle& prepared) {  // driver.Prepared
  Launch launch{};
  launch.function = reinterpret_cast<void*>(prepared.attr("function").cast<uint64_t>());
  const auto grid = prepared.attr("grid").cast<std::vector<unsigned>>();
  for (size_t i = 0; i < 3; ++i) launch.grid[i] = i < grid.size() ? grid[i] : 1;
  launch.overlap = prepared.attr("overlap").cast<bool>();
  for (const py::handle argument : prepared.attr("arguments")) {
    const py::object place = argument.attr("place");
    launch.arguments.push_back(
        {argument.attr("bits").cast<uint64_t>(), place.is_none() ? -1 : place.cast<int>()});
  }
  TORCH_CHECK(launch.arguments.size() <= MOST_WORDS, "tilenorm: too many arguments of a launch");
  return launch;
}

// made: of each tensor None, or (sizes, strides, dtype). shown: of some of them (place, sizes,
// strides, dtype). launches: of driver.Prepared, or in tests a function.
py::object repeat(int index, uint64_t context, size_t reads, const std::vector<size_t>& strided,
                  const py::sequence& made, const std::vector<size_t>& cleared,
                  const py::sequence& shown, size_t results, const py::object& launches) {
  auto repeat = std::make_shared<Repeat>();
  if (index >= 0) repeat->device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  repeat->context = reinterpret_cast<void*>(context);
  repeat->reads = reads;
  repeat->results = results;
  for (size_t place : strided) repeat->strided |= uint64_t(1) << place;
  for (const py::handle each : made) {
    if (each.is_none()) {
      repeat->made.emplace_back();
      continue;
    }
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    repeat->made.emplace_back(Fresh{dtype_of(fields[2]), sizes_of(fields[0]), sizes_of(fields[1])});
  }
  TORCH_CHECK(reads + made.size() < MOST_TENSORS / 2, "tilenorm: too many tensors");
  for (size_t place : cleared) repeat->made.at(place)->cleared = true;
  for (const py::handle each : shown) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    repeat->made.at(fields[0].cast<size_t>())->shown =
        Fresh::View{sizes_of(fields[1]), sizes_of(fields[2]), dtype_of(fields[3])};
  }
  if (PyCallable_Check(launches.ptr())) {
    repeat->interpreter = launches;
  } else {
    for (const py::handle each : launches) repeat->launches.push_back(launch_of(each));
  }
  return py::reinterpret_steal<py::object>(function_of(
      std::make_unique<RepeatPtr>(std::move(repeat)), &repeat_definition, REPEAT));
}

// inputs: tensors like those of later calls. strided, copied: the places of those whose strides
// count, and of those of them that the passes read as contiguous copies. steps: of each pass what
// `repeat` returned, and the places that it reads. gives: of each output its place, and the sizes
// that it gets or None.
Program program_of(const py::sequence& inputs, const std::vector<size_t>& strided,
                   const std::vector<size_t>& copied, const py::sequence& steps,
                   const py::sequence& gives) {
  const auto has = [](const std::vector<size_t>& places, size_t place) {
    return std::find(places.begin(), places.end(), place) != places.end();
  };
  Program program;
  for (const py::handle each : inputs) {
    if (each.is_none()) {
      program.inputs.emplace_back();
      continue;
    }
    const size_t place = program.inputs.size();
    const Tensor& t = THPVariable_Unpack(each.ptr());
    program.inputs.emplace_back(Like(t, has(strided, place), has(copied, place)));
  }
  size_t count = 1 + program.inputs.size();
  for (const py::handle each : steps) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    Step step{object_of<RepeatPtr>(fields[0], REPEAT), fields[1].cast<std::vector<int>>()};
    TORCH_CHECK(step.reads.size() == step.repeat->reads, "tilenorm: a pass reads other tensors");
    count += step.repeat->made.size();  // at least as many as there are places
    program.steps.push_back(std::move(step));
  }
  TORCH_CHECK(count <= MOST_TENSORS, "tilenorm: too many tensors");
  for (const py::handle each : gives) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    const py::object sizes = fields[1];
    Give give{fields[0].cast<int>(), std::nullopt};
    if (!sizes.is_none()) give.sizes = sizes_of(sizes);
    program.gives.push_back(std::move(give));
  }
  return program;
}

// A call that Python has made, and what repeats it. requires_grad: whether a tensor does.
// recording: whether autograd records the call. differentiable: of each result that a user gets.
// saved: see Forward. token, python: see Recorded.
void remember(const py::tuple& call, bool requires_grad, bool recording,
              const std::vector<bool>& differentiable, const py::object& repeat,
              const std::vector<size_t>& strided, const std::vector<size_t>& copied,
              const std::vector<size_t>& saved,
              const py::object& token, const py::object& python) {
  const auto kept = [](const py::object& object) { return py::object(object).release().ptr(); };
  TORCH_CHECK(call.size() == 6, "tilenorm: a call has 6 arguments");
  const py::tuple tensors = call[1];
  const py::object op = call[0], shape = call[2], eps = call[3], asked = call[4], backend = call[5];
  Given given;
  TORCH_CHECK_TYPE(given.read(&PyTuple_GET_ITEM(tensors.ptr(), 0), tensors.size()) &&
                       given.impls[0], "tilenorm: takes plain tensors");
  Kind* kind = kind_of(given, op.ptr(), tensors.ptr(), shape.ptr(), eps.ptr(), asked.ptr(),
                       backend.ptr());
  if (!kind) {
    kind = new Kind;  // nodes of a graph refer to it: it is never freed
    kind->op = kept(op);
    kind->eps = kept(eps);
    kind->asked = kept(asked);
    kind->backend = kept(backend);
    kind->of_list = PyList_CheckExact(shape.ptr());
    kind->normalized_shape = sizes_of(shape);
    kind->records = requires_grad;
    kind->differentiable = differentiable;
    kind->shown = differentiable.size();
    kind->name = "tilenorm::" + op.cast<std::string>();
    kind->recorded.takes = tensors.size();
    kind->recorded.token = kept(token);
    kind->recorded.python = kept(python);
    const auto thread = c10::impl::tls_local_dispatch_key_set();
    for (size_t i = 0; i < tensors.size(); ++i) {
      kind->tensors.emplace_back();
      if (const auto* impl = given.impls[i]) {
        kind->tensors.back() = Kind::Seen{Py_TYPE(PyTuple_GET_ITEM(tensors.ptr(), i)),
                                          keys_of(impl, thread), impl->requires_grad(),
                                          Like(*given.tensors[i], false, false)};
      }
    }
    kinds.emplace(mark_of(kind->op, given.impls[0], given.there), kind);
  }
  if (kind->of(recording, given.impls)) return;
  std::vector<int> reads(tensors.size());
  for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(1 + i);
  py::list steps;
  steps.append(py::make_tuple(repeat, reads));
  kind->forward[recording].push_back(std::make_unique<const Forward>(
      Forward{program_of(tensors, strided, copied, steps, py::list()), saved}));
}

// number: of a Recorded.
void add_backward(uint64_t number, uint32_t asked, uint32_t arrived, const py::sequence& inputs,
                  const std::vector<size_t>& strided, const std::vector<size_t>& copied,
                  const py::sequence& steps, const py::sequence& gives) {
  auto* recorded = reinterpret_cast<Recorded*>(number);
  Given given;
  const auto all = py::tuple(inputs);
  if (!given.read(&PyTuple_GET_ITEM(all.ptr(), 0), all.size()) ||
      recorded->of(asked, arrived, given.impls)) {
    return;
  }
  recorded->add(std::make_unique<Backward>(
      Backward{asked, arrived, program_of(inputs, strided, copied, steps, gives)}));
}

py::object generated(const py::object& python) {
  auto made = std::make_unique<Generated>();
  made->python = python;
  return py::reinterpret_steal<py::object>(
      function_of(std::move(made), &generated_definition, GENERATED));
}

void add_generated(const py::object& function, const py::sequence& inputs,
                   const std::vector<size_t>& strided, const std::vector<size_t>& copied,
                   const py::sequence& steps, const py::sequence& gives) {
  auto& programs = object_of<Generated>(function, GENERATED).programs;
  Given given;
  const auto all = py::tuple(inputs);
  if (programs.size() >= MOST_PROGRAMS ||
      !given.read(&PyTuple_GET_ITEM(all.ptr(), 0), all.size())) {
    return;
  }
  for (const auto& program : programs) {
    if (program->matches(given.impls)) return;
  }
  programs.push_back(
      std::make_unique<const Program>(program_of(inputs, strided, copied, steps, gives)));
}

// ordinary: the dispatch keys of plain tensors. queue, current, enter: the addresses of the driver's
// cuLaunchKernelEx, cuCtxGetCurrent and cuCtxSetCurrent; 0 where there is none.
void start(uint64_t ordinary, const py::object& size, uint64_t queue, uint64_t current,
           uint64_t enter) {
  ordinary_keys = ordinary;
  size_type = reinterpret_cast<PyTypeObject*>(size.ptr());
  driver = {reinterpret_cast<decltype(driver.queue)>(queue),
            reinterpret_cast<decltype(driver.current_context)>(current),
            reinterpret_cast<decltype(driver.enter_context)>(enter)};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("repeat", &repeat);
  m.def("remember", &remember);
  m.def("add_backward", &add_backward);
  m.def("generated", &generated);
  m.def("add_generated", &add_generated);
  m.def("kinds", [] { return kinds.size(); });
  m.def("forget", [] { kinds.clear(); });  // nodes of a graph may still refer to a kind
  m.attr("served") = py::reinterpret_steal<py::object>(PyCFunction_New(&served_definition, nullptr));
}

}  // namespace tilenorm
