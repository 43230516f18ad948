#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <tuple>

#include "hash/block_hash.hpp"
#include "hash/checksum.hpp"
#include "hash/python_tokens.hpp"
#include "hash/vector_clones.hpp"

namespace fdcache {
namespace {

// --- tokens as Python gives them ---------------------------------------------------------------------------

using Allocate = AllocateTokens;

[[noreturn]] void refuse(Py_ssize_t position, nb::handle value, const char *why) {
    throw HashingError("tokens[" + std::to_string(position) + "] is " + nb::repr(value).c_str() + ": " + why);
}

template <typename Int>
std::int32_t narrow(Int value, Py_ssize_t position) {
    const auto token = static_cast<std::int32_t>(value);
    if (token != value) refuse(position, nb::int_(value), "a token must fit a 32-bit signed integer");
    return token;
}

// Any object with __index__, such as a NumPy integer. Separate from plain ints, which stay fast.
std::int32_t token_from_index(PyObject *value, Py_ssize_t position) {
    if (PyBool_Check(value) || !PyIndex_Check(value)) refuse(position, value, "a token must be an integer");
    const nb::object keep = nb::borrow(value);
    const nb::object index = nb::steal(PyNumber_Index(value));
    if (!index.is_valid()) nb::raise_python_error();
    int overflow;
    const long number = PyLong_AsLongAndOverflow(index.ptr(), &overflow);
    if (overflow) refuse(position, index, "a token must fit a 32-bit signed integer");
    return narrow(number, position);
}

// Reads an int of one digit (30 bits), as almost every token is: a call for each would cost as much as the
// hashing.
inline bool read_small(PyObject *value, std::int32_t &token) {
    if (!PyLong_CheckExact(value)) return false;
    const auto *number = reinterpret_cast<const PyLongObject *>(value);
#if PY_VERSION_HEX >= 0x030c0000
    if (!PyUnstable_Long_IsCompact(number)) return false;
    token = static_cast<std::int32_t>(PyUnstable_Long_CompactValue(number));
#else
    if (Py_SIZE(number) != 1) return false;
    token = static_cast<std::int32_t>(number->ob_digit[0]);
#endif
    return true;
}

}  // namespace

std::int32_t token_from(PyObject *value, Py_ssize_t position) {
    if (!PyLong_CheckExact(value)) [[unlikely]]
        return token_from_index(value, position);
    std::int32_t small;
    if (read_small(value, small)) return small;
    int overflow;
    const long number_or_overflow = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow) refuse(position, value, "a token must fit a 32-bit signed integer");
    return narrow(number_or_overflow, position);
}

namespace {

template <typename Int>
void narrow_all(const Py_buffer &buffer, const Allocate &allocate) {
    const Py_ssize_t size = buffer.ndim == 0 ? 1 : buffer.shape[0];
    const Py_ssize_t stride = buffer.ndim == 0 ? 0 : buffer.strides[0];
    const auto *data = static_cast<const std::uint8_t *>(buffer.buf);
    std::int32_t *out = allocate(static_cast<std::size_t>(size));
    if (sizeof(Int) == sizeof *out && stride == sizeof *out) {
        std::memcpy(out, data, static_cast<std::size_t>(size) * sizeof *out);
        return;
    }
    for (Py_ssize_t i = 0; i < size; ++i) {
        Int value;
        std::memcpy(&value, data + i * stride, sizeof value);
        out[i] = narrow(value, i);
    }
}

bool is_signed_integer(const Py_buffer &buffer) {
    std::string_view format = buffer.format ? buffer.format : "B";
    if (format.starts_with('<') || format.starts_with('=') || format.starts_with('@'))
        format.remove_prefix(1);
    return (format == "i" || format == "l" || format == "q") &&
           (buffer.itemsize == 4 || buffer.itemsize == 8);
}

void read_buffer(nb::handle tokens, const Allocate &allocate) {
    const auto release = [](Py_buffer *buffer) { PyBuffer_Release(buffer); };
    Py_buffer buffer;
    if (PyObject_GetBuffer(tokens.ptr(), &buffer, PyBUF_RECORDS_RO)) nb::raise_python_error();
    const std::unique_ptr<Py_buffer, decltype(release)> guard(&buffer);
    if (buffer.ndim > 1 || !is_signed_integer(buffer))
        throw HashingError("tokens must be a one-dimensional int32 or int64 array, got " +
                           std::to_string(buffer.ndim) + " dimensions of format '" +
                           (buffer.format ? buffer.format : "B") + "'");
    if (buffer.itemsize == 8) return narrow_all<std::int64_t>(buffer, allocate);
    narrow_all<std::int32_t>(buffer, allocate);
}

void read_sequence(const nb::object &sequence, const Allocate &allocate) {
    PyObject *fast = sequence.ptr();
    const auto size = PySequence_Fast_GET_SIZE(fast);
    std::int32_t *out = allocate(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        // An __index__ may run any code, and even shorten the list; small ints run none.
        if (PySequence_Fast_GET_SIZE(fast) < size)
            throw HashingError("tokens were removed while they were read");
        PyObject **items = PySequence_Fast_ITEMS(fast);
        while (i < size && read_small(items[i], out[i])) ++i;
        if (i < size) out[i] = token_from(items[i], i);
    }
}

}  // namespace

void read_tokens(nb::handle tokens, const Allocate &allocate) {
    if (PyList_Check(tokens.ptr())) return read_sequence(nb::borrow(tokens), allocate);
    if (PyObject_CheckBuffer(tokens.ptr())) return read_buffer(tokens, allocate);
    if (!PySequence_Check(tokens.ptr()) || PyUnicode_Check(tokens.ptr()))
        throw HashingError("tokens must be an int32 or int64 array or a sequence of int, got " +
                           std::string(nb::type_name(tokens.type()).c_str()));
    const nb::object sequence = nb::steal(PySequence_Fast(tokens.ptr(), "tokens must be a sequence of int"));
    if (!sequence.is_valid()) nb::raise_python_error();
    read_sequence(sequence, allocate);
}

// --- hashes ------------------------------------------------------------------------------------------------

HashRows hash_rows(std::shared_ptr<Digest[]> store, std::size_t rows) {
    const auto *data = reinterpret_cast<const std::uint8_t *>(store.get());
    return HashRows(data, {rows, sizeof(Digest)}, keeper(std::move(store)));
}

namespace {

const HashBackend &backend_of(const std::optional<std::string> &name) {
    if (!name) return best_hash_backend();
    for (const HashBackend &backend : hash_backends())
        if (*name == backend.name) return backend;
    throw HashingError("backend '" + *name + "' is not one of hash_backends()");
}

Digest keyed_digest_of(const nb::bytes &message, const nb::bytes &key,
                       const std::optional<std::string> &backend) {
    if (message.size() == 0) throw HashingError("message must not be empty");
    const auto *data = reinterpret_cast<const std::uint8_t *>(message.c_str());
    const auto words = std::bit_cast<blake3::Key>(digest_of<HashingError>("key", key));
    return keyed_digest(backend_of(backend), words, {data, message.size()});
}

HashRows hash_blocks(nb::handle tokens, std::int64_t block_size, const nb::bytes &parent, std::int64_t start,
                     const ExtraKeys &extra_keys, std::int64_t lookahead,
                     const std::optional<std::string> &backend) {
    BlockChain chain(block_size, digest_of<HashingError>("parent", parent), start, extra_keys, lookahead,
                     backend_of(backend));
    std::unique_ptr<std::int32_t[]> values;
    std::size_t blocks = 0;
    read_tokens(tokens, [&](std::size_t count) {
        blocks = chain.blocks_in(count);
        values = std::make_unique_for_overwrite<std::int32_t[]>(count);
        return values.get();
    });
    auto store = std::make_shared_for_overwrite<Digest[]>(blocks);
    {
        nb::gil_scoped_release release;
        chain.extend(values.get(), {store.get(), blocks});
    }
    return hash_rows(std::move(store), blocks);
}

}  // namespace

void append_tokens(TokenBlocks &self, nb::handle tokens) {
    if (PyLong_CheckExact(tokens.ptr())) {
        *self.extend(1) = token_from(tokens.ptr(), 0);
        return self.commit(1);
    }
    const std::size_t before = self.tokens().size();
    std::size_t count = 0;
    std::shared_ptr<std::int32_t[]> written;
    read_tokens(tokens, [&](std::size_t size) {
        std::int32_t *out = self.extend(count = size);
        written = self.tokens().share();
        return out;
    });
    // An element's __index__ may have appended to this very object.
    if (self.tokens().size() != before || self.tokens().share() != written)
        throw HashingError("tokens were appended while others were read");
    self.commit(count);
}

namespace {

void bind_extra_keys(nb::module_ &module) {
    using Item = std::tuple<std::int64_t, std::int64_t, nb::bytes, bool>;
    nb::class_<ExtraKeys>(
        module, "ExtraKeys",
        "The inputs of a request, other than its tokens and its root, that its KV depends on.")
        .def(
            "__init__",
            [](ExtraKeys *self, const std::optional<nb::bytes> &adapter_id, const std::vector<Item> &items) {
                std::optional<std::string> adapter;
                if (adapter_id) adapter.emplace(adapter_id->c_str(), adapter_id->size());
                std::vector<MultimodalItem> converted;
                for (const auto &[offset, length, hash, is_text] : items)
                    converted.push_back({offset, length, std::string(hash.c_str(), hash.size()), is_text});
                new (self) ExtraKeys(std::move(adapter), std::move(converted));
            },
            "adapter_id"_a.none(), "items"_a,
            "``items``: (offset, length, hash, hash is text) of each multimodal item, in order and\n"
            "disjoint.")
        .def(
            "block_items",
            [](const ExtraKeys &self, std::int64_t start, std::int64_t end, std::size_t index) {
                auto found = self.block_items(start, end, index);
                return std::pair(index, std::move(found));
            },
            "start"_a, "end"_a, "index"_a,
            "Find the items that overlap the block of tokens [start, end), searching from item\n"
            "``index``.\n\n"
            "Returns the index from which to search for the next block, and the items' positions.");
}

void bind_token_blocks(nb::module_ &module) {
    nb::class_<TokenBlocks>(module, "TokenBlocks",
                            "The tokens of a request and the hashes of its full blocks, growing at the end.")
        .def(
            "__init__",
            [](TokenBlocks *self, std::int64_t block_size, const nb::bytes &root, const ExtraKeys &extra_keys,
               std::int64_t lookahead) {
                new (self)
                    TokenBlocks(block_size, digest_of<HashingError>("root", root), extra_keys, lookahead);
            },
            "block_size"_a, "root"_a, "extra_keys"_a, "lookahead"_a = 0)
        .def("append", &append_tokens, "tokens"_a.none(),
             nb::sig("def append(self, tokens: int | " FDCACHE_TOKENS ") -> None"),
             "Append tokens and hash the blocks that they complete.")
        .def("__len__", [](const TokenBlocks &self) { return self.tokens().size(); })
        .def_prop_ro("block_size", &TokenBlocks::block_size)
        .def_prop_ro("num_tokens", [](const TokenBlocks &self) { return self.tokens().size(); })
        .def_prop_ro("num_blocks", [](const TokenBlocks &self) { return self.hashes().size(); })
        .def_prop_ro(
            "hashes",
            [](const TokenBlocks &self) { return hash_rows(self.hashes().share(), self.hashes().size()); },
            nb::rv_policy::automatic)
        .def_prop_ro(
            "tokens",
            [](const TokenBlocks &self) {
                return TokenRow(self.tokens().data(), {self.tokens().size()}, keeper(self.tokens().share()));
            },
            nb::rv_policy::automatic);
}

// --- keys --------------------------------------------------------------------------------------------------

// Sets 32 bytes to what 64 hexadecimal digits say. Returns false for other characters. Written so that the
// compiler can use vectors.
FDCACHE_VECTOR_CLONES bool read_hex(const char *digits, std::uint8_t *bytes) {
    std::uint8_t nibbles[64];
    std::uint8_t wrong = 0;
    for (int i = 0; i < 64; ++i) {
        const auto each = static_cast<std::uint8_t>(digits[i]);
        const auto lower = static_cast<std::uint8_t>(each | 0x20);
        const bool is_digit = each >= '0' && each <= '9', is_letter = lower >= 'a' && lower <= 'f';
        wrong |= static_cast<std::uint8_t>(!(is_digit | is_letter));
        nibbles[i] = static_cast<std::uint8_t>(is_digit ? each - '0' : lower - 'a' + 10);
    }
    for (int i = 0; i < 32; ++i)
        bytes[i] = static_cast<std::uint8_t>(nibbles[2 * i] << 4 | nibbles[2 * i + 1]);
    return !wrong;
}

HashesOut keys_from_hex(const nb::typed<nb::list, nb::str> &keys) {
    constexpr std::size_t ahead = 16;  // strings of other steps, which lie anywhere
    const std::size_t count = keys.size();
    const auto at = [&](std::size_t i) { return PyList_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i)); };
    std::vector<Digest> digests(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (i + ahead < count) {
            const auto *const next = reinterpret_cast<const char *>(at(i + ahead));
            __builtin_prefetch(next);
            __builtin_prefetch(next + 64);
        }
        PyObject *const key = at(i);
        const bool is_short = !PyUnicode_Check(key) || PyUnicode_KIND(key) != PyUnicode_1BYTE_KIND ||
                              PyUnicode_GET_LENGTH(key) != 64;
        if (is_short || !read_hex(static_cast<const char *>(PyUnicode_DATA(key)), digests[i].bytes.data()))
            throw HashingError("keys[" + std::to_string(i) + "] is not 64 hexadecimal digits");
    }
    return hashes_to_numpy(std::move(digests));
}

bool has_reserved_keys(const HashesIn &keys) {
    return std::ranges::any_of(digests_of(keys), [](const Digest &each) { return each.is_no_block(); });
}

// --- checksums ---------------------------------------------------------------------------------------------

using Sizes = std::vector<std::size_t>;
using TargetBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_planes(std::size_t record_bytes, const Sizes &offsets, const Sizes &sizes) {
    if (offsets.size() != sizes.size()) throw std::invalid_argument("offsets and sizes differ in length");
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        if (offsets[i] % 8 != 0)
            throw std::invalid_argument("a plane's record offset must be a multiple of 8");
        if (offsets[i] > record_bytes || sizes[i] > record_bytes - offsets[i])
            throw std::invalid_argument("a plane extends beyond the record");
    }
}

std::uint64_t record_checksum(const VectorIn<std::uint8_t> &record, const Sizes &offsets,
                              const Sizes &sizes) {
    check_planes(record.shape(0), offsets, sizes);
    const nb::gil_scoped_release release;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < offsets.size(); ++i)
        sum += checksum_part(record.data() + offsets[i], sizes[i], offsets[i] / 8);
    return finish_checksum(sum, std::reduce(sizes.begin(), sizes.end()));
}

std::uint64_t copy_record_with_checksum(const TargetBytes &target, const VectorIn<std::uint8_t> &source,
                                        const Sizes &offsets, const Sizes &sizes) {
    if (target.shape(0) != source.shape(0)) throw std::invalid_argument("target and source differ in length");
    check_planes(source.shape(0), offsets, sizes);
    const nb::gil_scoped_release release;
    std::uint64_t sum = 0;
    std::size_t end = 0;  // of what is copied
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        if (offsets[i] > end) std::memcpy(target.data() + end, source.data() + end, offsets[i] - end);
        sum += copy_with_checksum(target.data() + offsets[i], source.data() + offsets[i], sizes[i],
                                  offsets[i] / 8);
        end = std::max(end, offsets[i] + sizes[i]);
    }
    std::memcpy(target.data() + end, source.data() + end, source.shape(0) - end);
    return finish_checksum(sum, std::reduce(sizes.begin(), sizes.end()));
}

void bind_checksums(nb::module_ &module) {
    module.def("record_checksum", &record_checksum, "record"_a, "offsets"_a, "sizes"_a,
               "Return the checksum of a record whose planes are at ``offsets``, multiples of 8.");
    module.def("copy_record_with_checksum", &copy_record_with_checksum, "target"_a, "source"_a, "offsets"_a,
               "sizes"_a,
               "Copy a record whole, and return the checksum of the copy, as ``record_checksum``.");
    module.def(
        "copy_with_checksum",
        [](const TargetBytes &target, const VectorIn<std::uint8_t> &source) {
            if (target.shape(0) != source.shape(0))
                throw std::invalid_argument("target and source differ in length");
            const nb::gil_scoped_release release;
            const auto sum = copy_with_checksum(target.data(), source.data(), source.shape(0), 0);
            return finish_checksum(sum, source.shape(0));
        },
        "target"_a, "source"_a, "Copy all bytes and return their checksum.");
}

}  // namespace

void bind_hashing(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const HashingError &error) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr("HashingError").ptr(), error.what());
        }
    });
    module.def(
        "has_reserved_keys", &has_reserved_keys, "keys"_a,
        "Return True if a key is all zeros or all ones, which stand for the root and for an unknown parent.");
    module.def("keys_from_hex", &keys_from_hex, "keys"_a,
               "Return block keys that are written as 64 hexadecimal digits each. Raises HashingError.");
    module.def(
        "hash_backends",
        [] {
            std::vector<std::string> names;
            for (const HashBackend &backend : hash_backends()) names.emplace_back(backend.name);
            return names;
        },
        "Names of the implementations of block hashes that this machine can run, those with the most "
        "instructions first.");
    module.def(
        "keyed_digest",
        [](const nb::bytes &message, const nb::bytes &key, const std::optional<std::string> &backend) {
            return digest_to_bytes(keyed_digest_of(message, key, backend));
        },
        "message"_a, "key"_a, "backend"_a.none() = nb::none(),
        "Return BLAKE3's keyed hash of a message, hashed as one chunk even if longer than 1,024 bytes.");
    module.def(
        "root_hash",
        [](const nb::bytes &fingerprint, const std::optional<nb::bytes> &tenant) {
            std::optional<std::string_view> salt;
            if (tenant) salt.emplace(tenant->c_str(), tenant->size());
            return digest_to_bytes(root_hash(digest_of<HashingError>("fingerprint", fingerprint), salt));
        },
        "fingerprint"_a, "tenant"_a.none(), "Return the hash before the first block of a request.");
    bind_extra_keys(module);
    module.def(
        "hash_blocks", &hash_blocks, "tokens"_a.none(), "block_size"_a, "parent"_a, "start"_a, "extra_keys"_a,
        "lookahead"_a = 0, "backend"_a.none() = nb::none(),
        nb::sig("def hash_blocks(tokens: " FDCACHE_TOKENS
                ", block_size: int, parent: bytes, start: int, extra_keys: ExtraKeys, lookahead: int = 0, "
                "backend: str | None = None) -> numpy.typing.NDArray[numpy.uint8]"),
        "Hash the full blocks of ``tokens``, which follow token ``start`` and the block ``parent``.\n\n"
        "Returns an array of shape (blocks, 32). Raises HashingError for bad arguments.");
    bind_token_blocks(module);
    bind_checksums(module);
}

}  // namespace fdcache
