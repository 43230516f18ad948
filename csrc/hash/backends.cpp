#include "hash/backends.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fdcache {
namespace {

using blake3::Messages;
using sha256::Links;

FDCACHE_UNSANITIZED void digest_portable(const Messages &messages, Digest *out, const Links &links) {
    blake3::Nothing nothing;
    blake3::digest_lanes<4>(messages, out, nothing);
    sha256::link_portable(links);
}

#if defined(__x86_64__)

FDCACHE_INLINE void digest(const Messages &messages, Digest *out) {
    blake3::Nothing nothing;
    if (messages.count <= 2)
        blake3::digest_two(messages, out);
    else
        blake3::digest_lanes<8>(messages, out, nothing);
}

// The links of a batch of blocks, as many as half the lanes, are made beside the next batch's digests.
FDCACHE_INLINE void digest_beside_links(const Messages &messages, Digest *out, const Links &links) {
    if (messages.count > 2 && links.count == 4) {
        sha256::Chain chain(links);
        blake3::digest_lanes<8>(messages, out, chain);
    } else {
        sha256::link_with_instructions(links);
        digest(messages, out);
    }
}

FDCACHE_INLINE void digest_before_links(const Messages &messages, Digest *out, const Links &links) {
    digest(messages, out);
    sha256::link_portable(links);
}

#if defined(FDCACHE_NO_AVX512)
constexpr bool kMayUseAvx512 = false;
#else
constexpr bool kMayUseAvx512 = true;
#endif

#define FDCACHE_AVX2 "avx2"
#define FDCACHE_AVX512 "avx2,avx512f,avx512vl"
#define FDCACHE_SHA "ssse3,sse4.1,sha"
#define FDCACHE_TARGET(isa) FDCACHE_UNSANITIZED __attribute__((target(isa)))

FDCACHE_TARGET(FDCACHE_AVX512 "," FDCACHE_SHA)
void digest_avx512_sha(const Messages &messages, Digest *out, const Links &links) {
    digest_beside_links(messages, out, links);
}

FDCACHE_TARGET(FDCACHE_AVX2 "," FDCACHE_SHA)
void digest_avx2_sha(const Messages &messages, Digest *out, const Links &links) {
    digest_beside_links(messages, out, links);
}

FDCACHE_TARGET(FDCACHE_AVX512)
void digest_avx512(const Messages &messages, Digest *out, const Links &links) {
    digest_before_links(messages, out, links);
}

FDCACHE_TARGET(FDCACHE_AVX2)
void digest_avx2(const Messages &messages, Digest *out, const Links &links) {
    digest_before_links(messages, out, links);
}

FDCACHE_TARGET(FDCACHE_SHA)
void link_sha(const Links &links) {
    sha256::link_with_instructions(links);
}

bool has_sha_instructions() {
    unsigned eax, ebx = 0, ecx, edx;
    const bool sha = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx >> 29 & 1);
    return sha && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#elif defined(__aarch64__)

// NEON is part of the architecture; four lanes fill its registers.
FDCACHE_UNSANITIZED void digest_neon_sha(const Messages &messages, Digest *out, const Links &links) {
    sha256::link_with_instructions(links);
    blake3::Nothing nothing;
    blake3::digest_lanes<4>(messages, out, nothing);
}

FDCACHE_UNSANITIZED void link_sha(const Links &links) {
    sha256::link_with_instructions(links);
}

bool has_sha_instructions() {
    constexpr unsigned long sha2 = 1 << 6;  // HWCAP_SHA2
    return (getauxval(AT_HWCAP) & sha2) != 0;
}

#endif

std::vector<HashBackend> find_backends() {
    std::vector<HashBackend> found;
#if defined(__x86_64__)
    const bool sha = has_sha_instructions(), avx2 = __builtin_cpu_supports("avx2");
    const bool avx512 =
        kMayUseAvx512 && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (avx512 && sha) found.push_back({"avx512+sha", 8, digest_avx512_sha, link_sha});
    if (avx2 && sha) found.push_back({"avx2+sha", 8, digest_avx2_sha, link_sha});
    if (avx512) found.push_back({"avx512", 8, digest_avx512, sha256::link_portable});
    if (avx2) found.push_back({"avx2", 8, digest_avx2, sha256::link_portable});
#elif defined(__aarch64__)
    if (has_sha_instructions()) found.push_back({"neon+sha", 4, digest_neon_sha, link_sha});
#endif
    found.push_back({"portable", 4, digest_portable, sha256::link_portable});
    return found;
}

// The time in which a backend digests and links a few blocks.
std::chrono::steady_clock::duration time_of(const HashBackend &backend) {
    constexpr int batches = 8, runs = 3;
    std::array<std::uint8_t, blake3::max_lanes * blake3::piece_bytes> data{};
    std::array<Digest, blake3::max_lanes> digests{}, keys{};
    const blake3::Key key{};
    Messages messages{backend.lanes, blake3::piece_bytes, {&key, &key}, {}};
    for (std::size_t i = 0; i < messages.count; ++i) messages.rows[i] = data.data() + i * blake3::piece_bytes;
    const Digest first{};
    const Links links{&first, data.data(), keys.data(), backend.lanes / 2};
    auto best = std::chrono::steady_clock::duration::max();
    for (int run = 0; run < runs; ++run) {
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < batches; ++i) backend.digest(messages, digests.data(), links);
        best = std::min(best, (std::chrono::steady_clock::now() - begin) / static_cast<int>(backend.lanes));
    }
    return best;
}

// The instructions that a machine has are not always its fastest: on a virtual Intel Xeon those for SHA took
// 30 times as long as plain words, beside vectors.
const HashBackend &find_best() {
    const auto found = hash_backends();
    const HashBackend *best = &found.front();
    auto least = time_of(*best);
    for (const HashBackend &backend : found.subspan(1)) {
        const auto time = time_of(backend);
        // As fast as another is not faster.
        if (time < least / 2) best = &backend, least = time;
    }
    return *best;
}

}  // namespace

std::span<const HashBackend> hash_backends() {
    static const std::vector<HashBackend> found = find_backends();
    return found;
}

const HashBackend &best_hash_backend() {
    static const HashBackend &best = find_best();
    return best;
}

Digest keyed_digest(const HashBackend &backend, const blake3::Key &key,
                    std::span<const std::uint8_t> message) {
    const std::size_t pieces = (message.size() + blake3::piece_bytes - 1) / blake3::piece_bytes;
    std::vector<std::uint8_t> padded(pieces * blake3::piece_bytes);
    std::copy(message.begin(), message.end(), padded.begin());
    const Messages messages{1, message.size(), {&key, &key}, {padded.data()}};
    Digest digests[blake3::max_lanes];
    backend.digest(messages, digests, {});
    return digests[0];
}

}  // namespace fdcache
