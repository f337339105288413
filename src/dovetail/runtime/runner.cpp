// Runs lists of ATen calls without Python's lock, in one thread or in several.
//
//     Python      stream = runner.stream([RunOp, AwaitFlag, ...]) ... runner.run(stream)
//     here        values [ t0 | t1 | t2 ... ]   one instruction after another, lock released
//
// A runner has one table of tensors, which all of its streams share. Two streams of one run never
// touch an entry at the same time: whoever reads what another stream wrote waits for a flag first.
// `frontends/instructions.py` says what each instruction does, and `frontends/runners.py` does the
// same in Python.

#include <Python.h>

#include <array>
#include <cfenv>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

// The three things that are wanted of torch/csrc/jit/python/pybind_utils.h and of
// torch/csrc/utils/python_arg_parser.h. To read these takes a compiler twice as long as all else.
// Where a torch has other functions, they are not found when the file is loaded, and Python's runner
// serves.
namespace torch {
TORCH_PYTHON_API bool should_allow_numbers_as_tensors(const std::string& name);
namespace jit {
TORCH_PYTHON_API c10::IValue toIValue(
    pybind11::handle value, const c10::TypePtr& type, std::optional<int32_t> N);
class TORCH_PYTHON_API ToIValueAllowNumbersAsTensors {
  bool old_;
  char spare_[56];  // a torch whose own is larger writes into this

 public:
  ToIValueAllowNumbersAsTensors(bool enable);
  ~ToIValueAllowNumbersAsTensors();
};
}  // namespace jit
}  // namespace torch

namespace {

// Functions of `runtime/waiting.py`, by address. They take (flag, value, abort, spin_ns) and return
// the flag's new value, or -1 if the abort flag was set; (flag, value); and (flag, value, target,
// source, bytes).
using Wait = int64_t (*)(int64_t, int64_t, int64_t, int64_t);
using Publish = void (*)(int64_t, int64_t);
using PublishCopy = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t);

constexpr int64_t kAborted = -1;
// The low bits of a flag are the mark of what was sent: an address modulo 64, and whether it has
// other strides than its view.
constexpr int64_t kSkew = 63, kLaid = 64, kMark = kSkew | kLaid;

Wait wait_for = nullptr;
Publish publish = nullptr;
PublishCopy publish_copy = nullptr;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

// A stream gave up because another stream, or another device, failed.
struct Aborted : std::exception {
  const char* what() const noexcept override { return "another device or stream failed"; }
};

// Says where a call's argument comes from: before each call the tensor of entry `slot` is put in
// place of the argument, or of one element of it.
struct Fill {
  int argument;
  int element;  // -1: the argument itself, not an element of a list
  int slot;
};

// Says where a returned value goes: the one at `place` becomes the tensor of entry `slot`.
struct Result {
  int place;
  int slot;
};

// A tensor in memory that another process reads or writes.
struct View {
  int64_t address = 0;
  int64_t laid = 0;  // where its strides stand if they are others
  int64_t bytes = 0;  // gaps that its strides leave included
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype = at::kFloat;

  at::IntArrayRef strides_of(int64_t mark) const {
    return mark & kLaid
        ? at::IntArrayRef(reinterpret_cast<const int64_t*>(laid), shape.size())
        : at::IntArrayRef(strides);
  }

  at::Tensor at(int64_t mark) const {
    return at::from_blob(
        reinterpret_cast<void*>(address + (mark & kSkew)), shape, strides_of(mark),
        at::TensorOptions().dtype(dtype));
  }

  // True if the value can be copied here as it lies: in as many bytes, and with the same elements
  // at one place.
  bool takes(const at::Tensor& value) const {
    int64_t last = 0;
    for (size_t dimension = 0; dimension < shape.size(); dimension++) {
      int64_t stride = value.stride(dimension);
      if (shape[dimension] > 1 && (stride == 0) != (strides[dimension] == 0)) {
        return false;
      }
      last += (shape[dimension] - 1) * stride;
    }
    return value.numel() > 0 && (last + 1) * static_cast<int64_t>(value.element_size()) <= bytes;
  }
};

enum class Kind { Call, Python, Kernel, Check, Lanes, Send, Wait };

struct Instruction;
using Instructions = std::deque<Instruction>;

// One instruction. Of the fields below only those of its kind are used.
struct Instruction {
  Kind kind;
  int tag = -1;            // the caller's number for it, which `failed` reports after an error
  std::vector<int> frees;  // slots that are emptied afterwards
  // Call
  std::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> arguments;
  std::vector<Fill> fills;
  std::vector<Result> results;
  bool listed = false;  // the operator returns one list of tensors
  int seed = -1;        // place of its seed; -1: it draws no numbers
  bool graded = false;  // it runs in grad mode, which some kernels ask for
  // Kernel: a C function of pointers to the data of `takes`
  void* kernel = nullptr;
  // Python
  std::shared_ptr<py::object> function;
  std::vector<int> takes;
  // Lanes
  std::vector<std::shared_ptr<Instructions>> streams;
  // Send, Wait
  int64_t flag = 0;
  int slot = -1;             // of Check as well
  std::optional<View> view;  // there is none where nothing but a flag is handed over
  bool plain = false;        // the bytes may be copied as they are
  int64_t mark = -1;
  at::Tensor copy;
  // Check
  std::vector<int64_t> shape, strides;
};

// Numbers that all threads draw come from one generator. It is seeded and used under this lock.
std::mutex generator;

// Cuts dimensions of stride 0 to length one: torch refuses to write to a tensor that has one element
// in several places.
at::Tensor distinct(at::Tensor tensor, const std::vector<int64_t>& strides) {
  for (size_t dimension = 0; dimension < strides.size(); dimension++) {
    if (strides[dimension] == 0 && tensor.size(dimension) > 1) {
      tensor = tensor.narrow(dimension, 0, 1);
    }
  }
  return tensor;
}

// What all streams of one run share.
struct Pass {
  std::vector<at::Tensor>& values;
  const std::vector<int64_t>& seeds;
  int64_t now;
  int64_t abort;
  int64_t spin_ns;
  int* failed;  // the tag of the instruction that failed, if that is known
};

// Holds the generator, seeded for a call that draws numbers, until it has drawn.
struct Seeded {
  Seeded(const Instruction& instruction, const Pass& pass) {
    if (instruction.seed < 0) {
      return;
    }
    held = std::unique_lock<std::mutex>(generator);
    at::Generator drawn = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> own(drawn.mutex());
    drawn.set_current_seed(static_cast<uint64_t>(pass.seeds.at(instruction.seed)));
  }

  std::unique_lock<std::mutex> held;
};

void call(Instruction& instruction, Pass& pass) {
  std::vector<c10::IValue> stack(instruction.arguments);
  int copied = -1;
  for (const Fill& fill : instruction.fills) {
    const at::Tensor& value = pass.values[fill.slot];
    c10::IValue filled = value.defined() ? c10::IValue(value) : c10::IValue();
    if (fill.element < 0) {
      stack[fill.argument] = std::move(filled);
      continue;
    }
    // Copies of a stack share its lists, so a list that is filled is a new one.
    if (fill.argument != copied) {
      stack[fill.argument] = stack[fill.argument].toList().copy();
      copied = fill.argument;
    }
    stack[fill.argument].toList().set(fill.element, std::move(filled));
  }
  {
    Seeded seeded(instruction, pass);
    std::optional<c10::AutoGradMode> graded;
    if (instruction.graded) {
      graded.emplace(true);
    }
    instruction.op->callBoxed(&stack);
  }
  if (instruction.listed) {
    auto list = stack.at(0).toTensorList();
    for (const Result& result : instruction.results) {
      pass.values[result.slot] = list.get(result.place);
    }
    return;
  }
  for (const Result& result : instruction.results) {
    const c10::IValue& value = stack.at(result.place);
    pass.values[result.slot] = value.isTensor() ? value.toTensor() : at::Tensor();
  }
}

// ---- C functions of so many pointers ----

constexpr size_t kMostPointers = 64;
using CallKernel = void (*)(void*, void* const*);

template <size_t... I>
void call_kernel(void* kernel, void* const* data, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(std::enable_if_t<(I >= 0), void*>...)>(kernel)(data[I]...);
}

template <size_t N>
void call_with(void* kernel, void* const* data) {
  call_kernel(kernel, data, std::make_index_sequence<N>());
}

template <size_t... N>
constexpr std::array<CallKernel, sizeof...(N)> callers(std::index_sequence<N...>) {
  return {&call_with<N>...};
}

constexpr auto kCallers = callers(std::make_index_sequence<kMostPointers + 1>());

void run_kernel(Instruction& instruction, Pass& pass) {
  void* data[kMostPointers];
  for (size_t place = 0; place < instruction.takes.size(); place++) {
    // Kernels write through some of these pointers; `data_ptr` of a tensor that shares its storage
    // copy-on-write would copy it first, as Python's kernels have it too.
    data[place] = pass.values[instruction.takes[place]].data_ptr();
  }
  kCallers[instruction.takes.size()](instruction.kernel, data);
}

// Compiled code is made for one layout. Where a dimension has one element its stride does not count.
void check(const Instruction& instruction, const Pass& pass) {
  const at::Tensor& value = pass.values[instruction.slot];
  at::IntArrayRef shape = instruction.shape, strides = instruction.strides;
  bool fits = value.defined() && value.sizes() == shape;
  for (size_t dimension = 0; fits && value.numel() > 0 && dimension < shape.size(); dimension++) {
    fits = shape[dimension] == 1 || value.stride(dimension) == strides[dimension];
  }
  TORCH_CHECK(fits, "compiled code was made for sizes ", shape, " and strides ", strides,
              " of an input, which has others");
}

void run_python(Instruction& instruction, Pass& pass) {
  // The generator comes before Python's lock, in all threads.
  Seeded seeded(instruction, pass);
  py::gil_scoped_acquire held;
  py::tuple given(instruction.takes.size());
  for (size_t place = 0; place < instruction.takes.size(); place++) {
    const at::Tensor& value = pass.values[instruction.takes[place]];
    given[place] = value.defined() ? py::cast(value) : py::none();
  }
  py::object made = (*instruction.function)(*given);
  if (instruction.results.empty()) {
    return;
  }
  auto returned = py::reinterpret_borrow<py::sequence>(made);
  for (const Result& result : instruction.results) {
    py::object value = returned[result.place];
    pass.values[result.slot] = value.is_none() ? at::Tensor() : value.cast<at::Tensor>();
  }
}

void wait(Instruction& instruction, Pass& pass) {
  int64_t reached = wait_for(instruction.flag, pass.now, pass.abort, pass.spin_ns);
  if (reached == kAborted) {
    throw Aborted();
  }
  if (instruction.view) {
    const View& view = *instruction.view;
    // Only where something has changed is the view made anew.
    int64_t mark = reached & kMark;
    if (mark != instruction.mark || instruction.copy.strides() != view.strides_of(mark)) {
      instruction.mark = mark;
      instruction.copy = view.at(mark);
    }
    pass.values[instruction.slot] = instruction.copy;
  }
}

void send(Instruction& instruction, Pass& pass) {
  if (!instruction.view) {
    publish(instruction.flag, pass.now);
    return;
  }
  const at::Tensor& value = pass.values[instruction.slot];
  const View& view = *instruction.view;
  int64_t source = reinterpret_cast<int64_t>(value.const_data_ptr());
  int64_t skew = source & kSkew, mark = skew;
  bool alike = value.scalar_type() == view.dtype && !value.is_neg() && !value.is_conj() &&
      value.sizes() == at::IntArrayRef(view.shape);
  if (alike && value.strides() != at::IntArrayRef(view.strides) && view.takes(value)) {
    mark |= kLaid;
    std::copy(
        value.strides().begin(), value.strides().end(), reinterpret_cast<int64_t*>(view.laid));
  }
  if (alike && instruction.plain && value.is_contiguous()) {
    publish_copy(instruction.flag, pass.now + mark, view.address + skew, source, view.bytes);
    return;
  }
  // Addresses mostly stay the same from step to step, so the view is kept.
  if (mark != instruction.mark || (mark & kLaid)) {
    instruction.mark = mark;
    instruction.copy = distinct(view.at(mark), view.strides);
  }
  instruction.copy.copy_(distinct(value, view.strides));
  publish(instruction.flag, pass.now + mark);
}

void run_lanes(Instruction& instruction, Pass& pass);

void run_one(Instruction& instruction, Pass& pass) {
  switch (instruction.kind) {
    case Kind::Call: call(instruction, pass); break;
    case Kind::Python: run_python(instruction, pass); break;
    case Kind::Kernel: run_kernel(instruction, pass); break;
    case Kind::Check: check(instruction, pass); break;
    case Kind::Lanes: run_lanes(instruction, pass); break;
    case Kind::Send: send(instruction, pass); break;
    case Kind::Wait: wait(instruction, pass); break;
  }
  for (int slot : instruction.frees) {
    pass.values[slot].reset();
  }
}

// ---- Threads that run streams beside the caller's ----
//
//     caller   publish(worker.begin) ── stream 0 ── wait(worker.end) of all
//     worker               └──────────── stream 1 ── publish(worker.end)
//
// A worker's thread runs each op alone (one intra-op thread), and so does the caller meanwhile.

// A flag has a cache line of its own, and the eight bytes behind it say whether somebody sleeps.
struct alignas(64) Flag {
  int64_t value[8] = {};
  int64_t address() const { return reinterpret_cast<int64_t>(value); }
};

constexpr int64_t kIdleSpinNs = 50000;
// A stream that waits for another stream of its run spins this long before it sleeps.
constexpr int64_t kStreamSpinNs = 1000000;
Flag never;

struct Failure {
  std::mutex lock;
  std::exception_ptr error;
  int tag = -1;

  // The first failure counts, but any other goes before a stream that only gave up.
  void add(std::exception_ptr other, int its_tag, bool gave_up) {
    std::lock_guard<std::mutex> held(lock);
    if (!error || (has_given_up && !gave_up)) {
      error = std::move(other);
      tag = its_tag;
      has_given_up = gave_up;
    }
  }

 private:
  bool has_given_up = false;
};

struct Passes {
  Pass pass;
  int64_t count;
  std::deque<Flag> ends;  // of each stream
  std::fenv_t environment;  // how the caller's thread rounds and treats denormals
  Flag abort;
  Failure failure;
};

void run_passes(Instructions& instructions, size_t number, Passes& passes) {
  c10::InferenceMode guard;
  int tag = -1;
  try {
    Pass pass = passes.pass;
    pass.abort = passes.abort.address();
    pass.spin_ns = kStreamSpinNs;
    for (int64_t done = 0; done < passes.count; done++, pass.now++) {
      for (Instruction& instruction : instructions) {
        tag = instruction.tag;
        run_one(instruction, pass);
      }
      // The next pass writes over the values, so it begins when all streams have ended this one.
      publish(passes.ends[number].address(), done + 1);
      for (size_t other = 0; done + 1 < passes.count && other < passes.ends.size(); other++) {
        if (wait_for(passes.ends[other].address(), done + 1, pass.abort, pass.spin_ns) ==
            kAborted) {
          throw Aborted();
        }
      }
    }
  } catch (const Aborted&) {
    passes.failure.add(std::current_exception(), tag, true);
  } catch (...) {
    passes.failure.add(std::current_exception(), tag, false);
    publish(passes.abort.address(), 1);
  }
}

class ThreadPool {
 public:
  // Runs the first stream here and each of the others in a thread of its own. Raises what the
  // first of them raised, once all have ended.
  void run(std::vector<std::shared_ptr<Instructions>>& streams, Passes& passes) {
    std::lock_guard<std::mutex> one_run(lock_);
    int threads = at::get_num_threads();
    grow(streams.size() - 1);
    at::set_num_threads(1);
    passes.ends.resize(streams.size());
    std::fegetenv(&passes.environment);
    for (size_t number = 1; number < streams.size(); number++) {
      Worker& worker = workers_[number - 1];
      worker.streams = &streams;
      worker.passes = &passes;
      publish(worker.begin.address(), ++worker.runs);
    }
    run_passes(*streams[0], 0, passes);
    for (size_t number = 1; number < streams.size(); number++) {
      Worker& worker = workers_[number - 1];
      wait_for(worker.end.address(), worker.runs, never.address(), kStreamSpinNs);
    }
    at::set_num_threads(threads);
    if (passes.failure.error) {
      *passes.pass.failed = passes.failure.tag;
      std::rethrow_exception(passes.failure.error);
    }
  }

 private:
  struct Worker {
    Flag begin, end;
    int64_t runs = 0;
    std::vector<std::shared_ptr<Instructions>>* streams = nullptr;
    Passes* passes = nullptr;
  };

  void grow(size_t count) {
    if (workers_.size() >= count) {
      return;
    }
    while (workers_.size() < count) {
      workers_.emplace_back();
      Worker& worker = workers_.back();
      try {
        std::thread([&worker, number = workers_.size()] { serve(worker, number); }).detach();
      } catch (...) {
        workers_.pop_back();
        throw;
      }
      worker.runs = 1;
      publish(worker.begin.address(), 1);
      wait_for(worker.end.address(), 1, never.address(), kIdleSpinNs);
    }
    // A new thread takes over the number of threads that any thread set last. The seats have set
    // it to one, so the caller's number is set again for threads that start later.
    at::set_num_threads(at::get_num_threads());
  }

  static void serve(Worker& worker, size_t number) {
    // At its first use of torch a thread takes over the number that another thread set last. That
    // use comes first here, so that it does not undo the next line.
    at::get_num_threads();
    at::set_num_threads(1);
    for (int64_t run = 1;; run++) {
      wait_for(worker.begin.address(), run, never.address(), kIdleSpinNs);
      if (worker.streams != nullptr) {
        std::fesetenv(&worker.passes->environment);
        run_passes(*(*worker.streams)[number], number, *worker.passes);
      }
      worker.streams = nullptr;
      publish(worker.end.address(), run);
    }
  }

  std::mutex lock_;
  std::deque<Worker> workers_;
};

ThreadPool& pool() {
  // Never destroyed: its threads wait for the next run until the process ends.
  static ThreadPool* pool = new ThreadPool();
  return *pool;
}

void run_lanes(Instruction& instruction, Pass& pass) {
  if (instruction.streams.size() == 1) {
    for (Instruction& one : *instruction.streams[0]) {
      try {
        run_one(one, pass);
      } catch (...) {
        *pass.failed = one.tag;
        throw;
      }
    }
    return;
  }
  Passes passes{pass, 1, {}, {}, {}, {}};
  pool().run(instruction.streams, passes);
}

// ---- What Python sees ----

// The arguments of a call, in the order of its operator's schema. Throws std::runtime_error for those
// that the schema does not have, that it lacks, or that are of another type.
std::vector<c10::IValue> filled(
    const c10::FunctionSchema& schema, const py::tuple& arguments, const py::dict& keywords) {
  std::vector<c10::IValue> stack;
  size_t given = 0;
  for (const c10::Argument& argument : schema.arguments()) {
    py::object value;
    if (stack.size() < arguments.size() && !argument.kwarg_only()) {
      value = arguments[stack.size()];
    } else if (keywords.contains(argument.name())) {
      value = keywords[argument.name().c_str()];
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
      continue;
    } else {
      throw std::runtime_error(schema.name() + " lacks " + argument.name());
    }
    try {
      stack.push_back(torch::jit::toIValue(value, argument.real_type(), argument.N()));
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
    given++;
  }
  if (given != arguments.size() + keywords.size()) {
    throw std::runtime_error(schema.name() + " has other arguments");
  }
  return stack;
}

class Stream {
 public:
  void add_call(
      int tag, const std::string& name, const std::string& overload, const py::tuple& arguments,
      const py::dict& keywords, const std::vector<std::pair<at::Tensor, int>>& standing_for,
      const std::vector<int>& results, const std::vector<int>& frees, int seed, bool graded) {
    c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const c10::FunctionSchema& schema = op.schema();
    // Where Python may pass a number for a tensor, it may here.
    std::string base = name.substr(name.rfind(':') + 1);
    torch::jit::ToIValueAllowNumbersAsTensors numbers(torch::should_allow_numbers_as_tensors(base));
    std::vector<c10::IValue> stack = filled(schema, arguments, keywords);
    // Nothing fails from here on, so an instruction is added whole or not at all.
    Instruction& added = add(Kind::Call, tag, frees);
    added.op = op;
    added.arguments = std::move(stack);
    std::unordered_map<const void*, int> slots;
    for (const auto& [tensor, slot] : standing_for) {
      slots.emplace(tensor.unsafeGetTensorImpl(), slot);
    }
    auto fill = [&](const c10::IValue& value, int argument, int element) {
      if (value.isTensor() && value.toTensor().defined()) {
        auto found = slots.find(value.toTensor().unsafeGetTensorImpl());
        if (found != slots.end()) {
          added.fills.push_back({argument, element, found->second});
        }
      }
    };
    for (size_t place = 0; place < added.arguments.size(); place++) {
      const c10::IValue& value = added.arguments[place];
      fill(value, place, -1);
      if (value.isList()) {
        auto list = value.toListRef();
        for (size_t element = 0; element < list.size(); element++) {
          fill(list[element], place, element);
        }
      }
    }
    added.listed = schema.returns().size() == 1 &&
        schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
    for (size_t place = 0; place < results.size(); place++) {
      if (results[place] >= 0) {
        added.results.push_back({static_cast<int>(place), results[place]});
      }
    }
    added.seed = seed;
    added.graded = graded;
  }

  void add_python(
      int tag, const py::object& function, const std::vector<int>& takes,
      const std::vector<int>& results, const std::vector<int>& frees, int seed) {
    Instruction& added = add(Kind::Python, tag, frees);
    added.seed = seed;
    // The last owner may let go of it without the lock.
    added.function = std::shared_ptr<py::object>(new py::object(function), [](py::object* object) {
      py::gil_scoped_acquire held;
      delete object;
    });
    added.takes = takes;
    for (size_t place = 0; place < results.size(); place++) {
      if (results[place] >= 0) {
        added.results.push_back({static_cast<int>(place), results[place]});
      }
    }
  }

  void add_kernel(
      int tag, int64_t address, const std::vector<int>& takes, const std::vector<int>& frees) {
    TORCH_CHECK(takes.size() <= kMostPointers, "a kernel of ", takes.size(), " tensors");
    Instruction& added = add(Kind::Kernel, tag, frees);
    added.kernel = reinterpret_cast<void*>(address);
    added.takes = takes;
  }

  void add_check(
      int tag, int slot, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    Instruction& added = add(Kind::Check, tag, {});
    added.slot = slot;
    added.shape = shape;
    added.strides = strides;
  }

  void add_lanes(int tag, const std::vector<Stream*>& streams, const std::vector<int>& frees) {
    Instruction& added = add(Kind::Lanes, tag, frees);
    for (Stream* stream : streams) {
      added.streams.push_back(stream->instructions);
    }
  }

  void add_send(
      int tag, int64_t flag, int slot, const std::optional<View>& view, bool plain,
      const std::vector<int>& frees) {
    Instruction& added = add(Kind::Send, tag, frees);
    added.flag = flag;
    added.slot = slot;
    added.view = view;
    added.plain = plain;
  }

  void add_wait(int tag, int64_t flag, int slot, const std::optional<View>& view) {
    Instruction& added = add(Kind::Wait, tag, {});
    added.flag = flag;
    added.slot = slot;
    added.view = view;
  }

  std::shared_ptr<Instructions> instructions = std::make_shared<Instructions>();

 private:
  Instruction& add(Kind kind, int tag, const std::vector<int>& frees) {
    Instruction& added = instructions->emplace_back();
    added.kind = kind;
    added.tag = tag;
    added.frees = frees;
    return added;
  }
};

// A step looks this often whether a signal has come.
constexpr int64_t kLookNs = 50'000'000;

class Runner {
 public:
  explicit Runner(int slots) : values_(slots) {}

  void set(int slot, const std::optional<at::Tensor>& value) {
    values_.at(slot) = value ? *value : at::Tensor();
  }

  std::optional<at::Tensor> get(int slot) const {
    const at::Tensor& value = values_.at(slot);
    return value.defined() ? std::optional<at::Tensor>(value) : std::nullopt;
  }

  void clear(const std::vector<int>& slots) {
    for (int slot : slots) {
      values_.at(slot).reset();
    }
  }

  // False if another device failed. `progress` and `stamps` are addresses, or 0.
  bool run(
      const Stream& stream, int64_t now, int64_t abort, int64_t spin_ns,
      const std::vector<int64_t>& seeds, int64_t progress, int64_t stamps) {
    failed = -1;
    py::gil_scoped_release released;
    c10::InferenceMode guard;
    Pass pass{values_, seeds, now, abort, spin_ns, &failed};
    auto begun = reinterpret_cast<volatile int64_t*>(progress);
    auto times = reinterpret_cast<int64_t*>(stamps);
    int64_t index = 0, looked = now_ns();
    for (Instruction& instruction : *stream.instructions) {
      if (now_ns() - looked > kLookNs) {
        looked = now_ns();
        py::gil_scoped_acquire held;
        // Ctrl-C ends a step that the caller's own thread runs.
        if (PyErr_CheckSignals() != 0) {
          throw py::error_already_set();
        }
      }
      if (begun != nullptr) {
        *begun = index;
      }
      if (times != nullptr) {
        times[2 * index] = now_ns();
      }
      try {
        run_one(instruction, pass);
      } catch (const Aborted&) {
        return false;
      } catch (...) {
        if (failed < 0) {
          failed = instruction.tag;
        }
        throw;
      }
      if (times != nullptr) {
        times[2 * index + 1] = now_ns();
      }
      index++;
    }
    if (begun != nullptr) {
      *begun = -1;
    }
    return true;
  }

  // Runs streams at the same time, `passes` times.
  void run_streams(
      const std::vector<Stream*>& streams, int64_t now, const std::vector<int64_t>& seeds,
      int64_t passes) {
    failed = -1;
    std::vector<std::shared_ptr<Instructions>> instructions;
    for (Stream* stream : streams) {
      instructions.push_back(stream->instructions);
    }
    py::gil_scoped_release released;
    Passes all{Pass{values_, seeds, now, never.address(), 0, &failed}, passes, {}, {}, {}, {}};
    pool().run(instructions, all);
  }

  int failed = -1;

 private:
  std::vector<at::Tensor> values_;
};

// True if each dict holds these keys and values, the same objects in the same order: the list has a
// tuple (key, value, key, value, ...) for each. A Python loop would take as long as some calls.
bool hold(const py::list& dicts, const py::list& known) {
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(dicts.ptr()); place++) {
    PyObject* entries = PyList_GET_ITEM(known.ptr(), place);
    PyObject *dict = PyList_GET_ITEM(dicts.ptr(), place), *key = nullptr, *value = nullptr;
    if (2 * PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(entries)) {
      return false;
    }
    for (Py_ssize_t at = 0, entry = 0; PyDict_Next(dict, &at, &key, &value); entry += 2) {
      if (key != PyTuple_GET_ITEM(entries, entry) || value != PyTuple_GET_ITEM(entries, entry + 1)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

PYBIND11_MODULE(dovetail_runner, module) {
  using torch::wrap_pybind_function;
  module.def("hold", &hold);
  module.def("use_waiting", [](int64_t wait, int64_t set, int64_t copy_and_set) {
    wait_for = reinterpret_cast<Wait>(wait);
    publish = reinterpret_cast<Publish>(set);
    publish_copy = reinterpret_cast<PublishCopy>(copy_and_set);
  });
  py::class_<View>(module, "View")
      .def(py::init([](int64_t address, int64_t laid, int64_t bytes, std::vector<int64_t> shape,
                       std::vector<int64_t> strides, at::ScalarType dtype) {
        return View{address, laid, bytes, std::move(shape), std::move(strides), dtype};
      }));
  py::class_<Stream>(module, "Stream")
      .def(py::init<>())
      .def("add_call", wrap_pybind_function(&Stream::add_call))
      .def("add_kernel", wrap_pybind_function(&Stream::add_kernel))
      .def("add_python", &Stream::add_python)
      .def("add_check", &Stream::add_check)
      .def("add_lanes", &Stream::add_lanes)
      .def("add_send", &Stream::add_send)
      .def("add_wait", &Stream::add_wait);
  py::class_<Runner>(module, "Runner")
      .def(py::init<int>())
      .def("set", &Runner::set)
      .def("get", &Runner::get)
      .def("clear", &Runner::clear)
      .def("run", wrap_pybind_function(&Runner::run))
      .def("run_streams", wrap_pybind_function(&Runner::run_streams))
      .def_readonly("failed", &Runner::failed);
}
