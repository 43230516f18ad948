#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "core/bindings.hpp"
#include "core/block_hash.hpp"
#include "core/token_blocks.hpp"
#include "core/token_input.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace fdcache {
namespace {

using HashRows = nb::ndarray<nb::numpy, const std::uint8_t, nb::shape<-1, 32>>;
using TokenRow = nb::ndarray<nb::numpy, const std::int32_t, nb::shape<-1>>;

Digest digest_of(const char *name, const nb::bytes &bytes) {
    Digest digest;
    if (bytes.size() != sizeof digest)
        throw HashingError(std::string(name) + " must have 32 bytes, got " + std::to_string(bytes.size()));
    std::memcpy(digest.bytes.data(), bytes.data(), sizeof digest);
    return digest;
}

nb::bytes to_bytes(const Digest &digest) {
    return nb::bytes(digest.bytes.data(), sizeof digest);
}

// A capsule that keeps `store` alive for as long as an array looks at it.
template <typename T>
nb::capsule keeper(std::shared_ptr<T[]> store) {
    auto holder = std::make_unique<std::shared_ptr<T[]>>(std::move(store));
    nb::capsule capsule(holder.get(),
                        [](void *p) noexcept { delete static_cast<std::shared_ptr<T[]> *>(p); });
    holder.release();
    return capsule;
}

HashRows hash_rows(std::shared_ptr<Digest[]> store, std::size_t rows) {
    const auto *data = reinterpret_cast<const std::uint8_t *>(store.get());
    return HashRows(data, {rows, sizeof(Digest)}, keeper(std::move(store)));
}

const sha256::Backend &backend_of(const std::optional<std::string> &name) {
    if (!name) return sha256::best_backend();
    for (const sha256::Backend &backend : sha256::backends())
        if (*name == backend.name) return backend;
    throw HashingError("backend '" + *name + "' is not one of sha_backends()");
}

HashRows hash_blocks(nb::handle tokens, std::int64_t block_size, const nb::bytes &parent, std::int64_t start,
                     const ExtraKeys &extra_keys, std::int64_t lookahead,
                     const std::optional<std::string> &backend) {
    BlockChain chain(block_size, digest_of("parent", parent), start, extra_keys, lookahead,
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

void append(TokenBlocks &self, nb::handle tokens) {
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
        throw HashingError("tokens were appended while others were being read");
    self.commit(count);
}

void bind_extra_keys(nb::module_ &module) {
    using Item = std::tuple<std::int64_t, std::int64_t, nb::bytes, bool>;
    nb::class_<ExtraKeys>(module, "ExtraKeys")
        .def(
            "__init__",
            [](ExtraKeys *self, const std::optional<nb::bytes> &adapter_id, const nb::list &items) {
                std::optional<std::string> adapter;
                if (adapter_id) adapter.emplace(adapter_id->c_str(), adapter_id->size());
                std::vector<MultimodalItem> converted;
                for (nb::handle item : items) {
                    const auto [offset, length, hash, is_text] = nb::cast<Item>(item);
                    converted.push_back({offset, length, std::string(hash.c_str(), hash.size()), is_text});
                }
                new (self) ExtraKeys(std::move(adapter), std::move(converted));
            },
            "adapter_id"_a.none(), "items"_a)
        .def("block_items",
             [](const ExtraKeys &self, std::int64_t start, std::int64_t end, std::size_t index) {
                 auto found = self.block_items(start, end, index);
                 return std::pair(index, std::move(found));
             });
}

void bind_token_blocks(nb::module_ &module) {
    nb::class_<TokenBlocks>(module, "TokenBlocks")
        .def(
            "__init__",
            [](TokenBlocks *self, std::int64_t block_size, const nb::bytes &root, const ExtraKeys &extra_keys,
               std::int64_t lookahead) {
                new (self) TokenBlocks(block_size, digest_of("root", root), extra_keys, lookahead);
            },
            "block_size"_a, "root"_a, "extra_keys"_a, "lookahead"_a = 0)
        .def("append", &append, "tokens"_a.none())
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

}  // namespace

void bind_hashing(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const HashingError &error) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr("HashingError").ptr(), error.what());
        }
    });
    module.def("sha_backends", [] {
        std::vector<std::string> names;
        for (const sha256::Backend &backend : sha256::backends()) names.emplace_back(backend.name);
        return names;
    });
    module.def(
        "sha256",
        [](const nb::bytes &message, const std::optional<std::string> &backend) {
            const auto *data = reinterpret_cast<const std::uint8_t *>(message.c_str());
            return to_bytes(sha256::digest(backend_of(backend), {data, message.size()}));
        },
        "message"_a, "backend"_a.none() = nb::none());
    module.def(
        "root_hash",
        [](const nb::bytes &fingerprint, const std::optional<nb::bytes> &tenant) {
            std::optional<std::string_view> salt;
            if (tenant) salt.emplace(tenant->c_str(), tenant->size());
            return to_bytes(root_hash(digest_of("fingerprint", fingerprint), salt));
        },
        "fingerprint"_a, "tenant"_a.none());
    bind_extra_keys(module);
    module.def("hash_blocks", &hash_blocks, "tokens"_a.none(), "block_size"_a, "parent"_a, "start"_a,
               "extra_keys"_a, "lookahead"_a = 0, "backend"_a.none() = nb::none());
    bind_token_blocks(module);
}

}  // namespace fdcache
