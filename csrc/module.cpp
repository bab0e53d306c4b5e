// The binding: raw addresses and numbers, because converting an array costs ten times the call. The Python side
// (kernels/cpu.py) owns the tensors and has checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx.h"
#include "ops.h"
#include "probe.h"
#include "suffix.h"
#include "tape.h"

namespace nb = nanobind;
using namespace obole;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

Kind kind_named(const std::string& name) {
    const char* names[] = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};
    for (int i = 0; i < 11; ++i)
        if (name == names[i]) return static_cast<Kind>(i);
    throw std::invalid_argument("unknown kind of weights " + name);
}

// The bound operations, and the tape that takes them down instead of running them, if there is one.
struct Desk {
    Desk(const Kernels* kernels, int threads) : ops(kernels, threads) {}

    Ops ops;
    Tape* tape = nullptr;

    template <class Operation>
    void submit(const char* name, Operation operation) {
        if (tape) return tape->add(name, std::move(operation));
        nb::gil_scoped_release release;
        operation();
    }
};

void bind_weights(nb::module_& m) {
    nb::class_<Packed>(m, "Packed")
        .def(nb::init<int64_t>())
        .def("add", [](Packed& w, const std::string& kind, int64_t outputs, Address bias) {
            w.add(kind_named(kind), outputs, at<const float>(bias));
        })
        .def("fill", [](Packed& w, Desk& desk, Address rows, int64_t row_bytes, int64_t first, int64_t count) {
            nb::gil_scoped_release release;
            w.fill(desk.ops.pool(), at<const uint8_t>(rows), row_bytes, first, count);
        })
        .def_prop_ro("outputs", &Packed::outputs)
        .def_prop_ro("nbytes", &Packed::bytes);
    m.def("file_bytes", [](const std::string& kind, int64_t inputs) { return file_bytes(kind_named(kind), inputs); });
}

void bind_kv_pool(nb::module_& m) {
    nb::class_<KvPool>(m, "KvPool")
        .def("__init__", [](KvPool* self, const std::string& format, Address k, Address v, Address scale_k, Address scale_v) {
            const char* names[] = {"float32", "bfloat16", "int8", "fp8"};
            int found = 0;
            while (found < 4 && format != names[found]) ++found;
            if (found == 4) throw std::invalid_argument("no such format of keys and values: " + format);
            new (self) KvPool{static_cast<KvFormat>(found), at<void>(k), at<void>(v), at<float>(scale_k), at<float>(scale_v)};
        });
}

void bind_matrix_ops(nb::class_<Desk>& c) {
    c.def("linear", [](Desk& desk, const Packed& w, Address x, int64_t x_row, int64_t rows, Address out) {
        desk.submit("linear", [=, &ops = desk.ops, &w] { ops.linear(w, at<const float>(x), x_row, rows, at<float>(out)); });
    });
    c.def("adapt", [](Desk& desk, const Packed& down, const Packed& up, Address x, int64_t x_row, Address ids, int32_t id,
                      int64_t rows, Address out, int64_t out_row) {
        desk.submit("adapt", [=, &ops = desk.ops, &down, &up] {
            ops.adapt(down, up, at<const float>(x), x_row, at<const int32_t>(ids), id, rows, at<float>(out), out_row);
        });
    });
    c.def("embed", [](Desk& desk, const Packed& w, Address ids, int64_t n, float scale, Address out) {
        desk.submit("embed", [=, &ops = desk.ops, &w] { ops.embed(w, at<const int32_t>(ids), n, scale, at<float>(out)); });
    });
    c.def("attention", [](Desk& desk, Address q, int64_t q_row, int64_t q_head, const KvPool& pool, Address table,
                          int64_t table_row, Address row_starts, Address pos_starts, int64_t sequences, int64_t rows,
                          int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, int64_t window, float softcap,
                          Address out) {
        const Attention a{at<const float>(q), q_row, q_head, pool, at<const int32_t>(table), table_row,
                          at<const int32_t>(row_starts), at<const int32_t>(pos_starts), sequences, heads, kv_heads, head_dim,
                          scale, window, softcap, at<float>(out)};
        desk.submit("attention", [=, &ops = desk.ops] { ops.attention(a, rows); });
    });
    c.def("kv_write", [](Desk& desk, Address k, int64_t k_row, int64_t k_head, Address v, int64_t v_row, int64_t v_head,
                         int64_t rows, int64_t kv_heads, int64_t head_dim, const KvPool& pool, Address slots) {
        desk.submit("kv_write", [=, &ops = desk.ops] {
            ops.kv_write(at<const float>(k), k_row, k_head, at<const float>(v), v_row, v_head, rows, kv_heads, head_dim,
                         pool, at<const int32_t>(slots));
        });
    });
}

void bind_row_ops(nb::class_<Desk>& c) {
    c.def("rms_norm", [](Desk& desk, Address x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t n,
                         Address weight, float eps, Address out) {
        desk.submit("norm", [=, &ops = desk.ops] {
            ops.rms_norm(at<const float>(x), rows, x_row, heads, x_head, n, at<const float>(weight), eps, at<float>(out));
        });
    });
    c.def("add_rms_norm", [](Desk& desk, Address x, int64_t x_row, Address residual, int64_t residual_row, int64_t rows,
                             int64_t n, Address weight, float eps, Address out) {
        desk.submit("norm", [=, &ops = desk.ops] {
            ops.add_rms_norm(at<const float>(x), x_row, at<float>(residual), residual_row, rows, n, at<const float>(weight),
                             eps, at<float>(out));
        });
    });
    c.def("add", [](Desk& desk, Address residual, int64_t residual_row, Address x, int64_t x_row, int64_t rows, int64_t n) {
        desk.submit("add", [=, &ops = desk.ops] {
            ops.add(at<float>(residual), residual_row, at<const float>(x), x_row, rows, n);
        });
    });
    c.def("rope", [](Desk& desk, Address x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t half,
                     Address positions, Address cos, Address sin) {
        desk.submit("rope", [=, &ops = desk.ops] {
            ops.rope(at<float>(x), rows, x_row, heads, x_head, half, at<const int32_t>(positions), at<const float>(cos),
                     at<const float>(sin));
        });
    });
    c.def("gated", [](Desk& desk, bool silu, Address x, int64_t x_row, int64_t rows, int64_t n, Address out) {
        desk.submit("activation", [=, &ops = desk.ops] {
            ops.gated(silu, at<const float>(x), x_row, rows, n, at<float>(out));
        });
    });
    c.def("argmax", [](Desk& desk, Address x, int64_t x_row, int64_t rows, int64_t n, Address out) {
        desk.submit("argmax", [=, &ops = desk.ops] { ops.argmax(at<const float>(x), x_row, rows, n, at<int64_t>(out)); });
    });
    c.def("confidence", [](Desk& desk, Address x, int64_t x_row, Address best, int64_t rows, int64_t n, Address out) {
        desk.submit("argmax", [=, &ops = desk.ops] {
            ops.confidence(at<const float>(x), x_row, at<const int64_t>(best), rows, n, at<float>(out));
        });
    });
    c.def("gumbel", [](Desk& desk, uint64_t seed, uint64_t position, Address ids, int64_t n, Address out) {
        desk.submit("gumbel", [=, &ops = desk.ops] { ops.gumbel(seed, position, at<const int64_t>(ids), n, at<float>(out)); });
    });
}

void bind_tape(nb::module_& m, nb::class_<Desk>& c) {
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>())
        .def("run_timed", &Tape::run_timed, nb::call_guard<nb::gil_scoped_release>())
        .def("__len__", &Tape::size);
    c.def("record", [](Desk& desk, Tape* tape) { desk.tape = tape; }, nb::arg("tape").none());
}

void bind_probe(nb::module_& m) {
    nb::class_<Probe>(m, "Probe")
        .def("__init__", [](Probe* self, int threads) {
            if (threads < 1) throw std::invalid_argument("at least one thread");
            new (self) Probe(threads);
        })
        .def_prop_ro("threads", &Probe::threads)
        .def("read", [](Probe& p, Address data, int64_t bytes) {
            nb::gil_scoped_release release;
            return p.read(at<const uint8_t>(data), bytes);
        })
        .def("multiply", [](Probe& p, const std::string& kind, const std::string& isa, int64_t rounds) {
            nb::gil_scoped_release release;
            return p.multiply(kind, isa, rounds);
        });
}

int32_t token_id(int64_t id) {
    if (id < 0 || id > INT32_MAX)
        throw std::invalid_argument("token ids go from 0 to 2147483647, and " + std::to_string(id) + " does not");
    return static_cast<int32_t>(id);
}

// The ids of a contiguous array of 32-bit integers; false for anything else.
bool read_array(nb::handle tokens, std::vector<int32_t>& ids) {
    Py_buffer view;
    if (!PyObject_CheckBuffer(tokens.ptr())) return false;
    if (PyObject_GetBuffer(tokens.ptr(), &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        return false;
    }
    const bool plain = view.ndim == 1 && view.itemsize == 4 && view.format && std::strcmp(view.format, "i") == 0;
    if (plain) ids.resize(static_cast<size_t>(view.len / 4));
    if (plain && view.len) std::memcpy(ids.data(), view.buf, static_cast<size_t>(view.len));
    PyBuffer_Release(&view);
    return plain;
}

// The ids of any sequence of integers, all of them checked.
std::vector<int32_t> token_ids(nb::handle tokens) {
    std::vector<int32_t> ids;
    if (read_array(tokens, ids)) {
        for (const int32_t id : ids) token_id(id);
        return ids;
    }
    const auto items = nb::steal(PySequence_Fast(tokens.ptr(), "token ids come in a sequence of integers"));
    if (!items.is_valid()) throw nb::python_error();
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(items.ptr());
    ids.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
        const long long id = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.ptr(), i));
        if (id == -1 && PyErr_Occurred()) throw nb::python_error();
        ids.push_back(token_id(id));
    }
    return ids;
}

void check_most(int64_t most) {
    if (most < 0) throw std::invalid_argument("a continuation cannot have " + std::to_string(most) + " tokens");
}

template <class Reader>
nb::object match_of(Reader& reader, int64_t most) {
    check_most(most);
    Match match;
    return reader.match(most, match) ? nb::cast(std::move(match)) : nb::none();
}

void bind_match(nb::module_& m) {
    nb::class_<Match>(m, "SuffixMatch")
        .def_ro("length", &Match::length)
        .def_ro("tokens", &Match::tokens)
        .def_ro("support", &Match::support)
        .def_ro("total", &Match::total)
        .def_prop_ro("branches", [](const Match& match) {
            nb::list branches;
            for (int i = 0; i < match.num_branches; ++i)
                branches.append(nb::make_tuple(match.branches[i].token, match.branches[i].count));
            return branches;
        });
}

void bind_suffix(nb::module_& m) {
    bind_match(m);
    nb::class_<SuffixIndex>(m, "SuffixIndex")
        .def(nb::init<int64_t, int64_t>(), nb::arg("counted") = SuffixIndex::kCounted, nb::arg("limit") = SuffixIndex::kLimit)
        .def("begin", &SuffixIndex::begin)
        .def("append", [](SuffixIndex& index, int64_t token) { index.append(token_id(token)); })
        .def("extend", [](SuffixIndex& index, nb::handle tokens) {
            const std::vector<int32_t> ids = token_ids(tokens);
            nb::gil_scoped_release release;
            index.extend(ids.data(), static_cast<int64_t>(ids.size()));
        })
        .def("resume", [](SuffixIndex& index, nb::handle tokens) {
            const std::vector<int32_t> ids = token_ids(tokens);
            nb::gil_scoped_release release;
            return index.resume(ids.data(), static_cast<int64_t>(ids.size()));
        })
        .def("match", &match_of<SuffixIndex>)
        .def("step", [](SuffixIndex& index, int64_t token, int64_t most) {
            check_most(most);
            index.append(token_id(token));
            return match_of(index, most);
        })
        .def("copy", [](const SuffixIndex& index) { return new SuffixIndex(index); }, nb::rv_policy::take_ownership)
        .def("__len__", &SuffixIndex::size)
        .def_prop_ro("nbytes", &SuffixIndex::bytes);
    nb::class_<SuffixCursor>(m, "SuffixCursor")
        .def(nb::init<const SuffixIndex&>(), nb::keep_alive<1, 2>())
        .def("advance", [](SuffixCursor& cursor, nb::handle tokens) {
            for (const int32_t token : token_ids(tokens)) cursor.advance(token);
        })
        .def("match", &match_of<SuffixCursor>)
        .def("step", [](SuffixCursor& cursor, int64_t token, int64_t most) {
            check_most(most);
            cursor.advance(token_id(token));
            return match_of(cursor, most);
        });
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // an engine that lives until the interpreter ends is no fault
    auto ops = nb::class_<Desk>(m, "Ops");
    bind_weights(m);
    bind_kv_pool(m);
    ops.def("__init__", [](Desk* self, const std::string& isa, int threads) {
        const Kernels* kernels = find_kernels(isa.c_str());
        if (!kernels) throw std::invalid_argument("no such instruction set here: " + isa);
        if (threads < 1) throw std::invalid_argument("at least one thread");
        new (self) Desk(kernels, threads);
    });
    ops.def_prop_ro("name", [](const Desk& d) { return std::string(d.ops.name()); });
    ops.def_prop_ro("threads", [](const Desk& d) { return d.ops.threads(); });
    bind_matrix_ops(ops);
    bind_row_ops(ops);
    bind_tape(m, ops);
    bind_probe(m);
    bind_suffix(m);
    m.def("runs", [](const std::string& isa) { return find_kernels(isa.c_str()) != nullptr; });
    m.def("amx_refusal", [] { return amx_refusal(); });
    m.def("same_products", [](const std::string& a, const std::string& b) {
        const Kernels *first = find_kernels(a.c_str()), *second = find_kernels(b.c_str());
        if (!first || !second) throw std::invalid_argument("no such instruction set here: " + (first ? b : a));
        return same_products(*first, *second);
    });
}
