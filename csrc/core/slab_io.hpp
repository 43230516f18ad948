// Whole transfers to and from a file, however the kernel cuts them up.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <vector>

namespace fdcache {

constexpr int kTruncated = ENODATA;  // the file ends before the record does

// The file may be no larger than it is, for whatever reason.
constexpr bool is_full(int error) {
    return error == ENOSPC || error == EDQUOT || error == EFBIG;
}

// Moves all of `vectors`. Returns an errno or 0.
int move_vectors(int fd, std::vector<iovec> vectors, off_t offset, bool writing);

}  // namespace fdcache
