#include "core/slab_io.hpp"

#include <algorithm>
#include <cstdint>

namespace fdcache {

int move_vectors(int fd, std::vector<iovec> vectors, off_t offset, bool writing) {
    std::size_t first = 0;
    while (first < vectors.size()) {
        const int count = static_cast<int>(vectors.size() - first);
        ssize_t moved = writing ? pwritev(fd, &vectors[first], count, offset)
                                : preadv(fd, &vectors[first], count, offset);
        if (moved < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (moved == 0) return writing ? EIO : kTruncated;
        offset += moved;
        for (auto left = static_cast<std::size_t>(moved); left > 0;) {
            iovec &vector = vectors[first];
            const std::size_t step = std::min(left, vector.iov_len);
            vector.iov_base = static_cast<std::uint8_t *>(vector.iov_base) + step;
            vector.iov_len -= step;
            left -= step;
            if (vector.iov_len == 0) ++first;
        }
    }
    return 0;
}

}  // namespace fdcache
