#include "native/stand_in_gpus.hpp"

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace fdcache::stand_in {
namespace {

std::array<char, kMostGpus> contexts_of;
thread_local std::vector<int> current;

std::string text_of_uuid(int gpu) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text = "GPU-";
    int count = 0;
    for (const unsigned char byte : uuid_of(gpu)) {
        if (count == 4 || count == 6 || count == 8 || count == 10) text += '-';
        text += {kDigits[byte >> 4], kDigits[byte & 15]};
        ++count;
    }
    return text;
}

std::vector<int> find_visible() {
    const char *count = std::getenv("STAND_IN_GPUS");
    const int gpus = count != nullptr ? std::atoi(count) : 1;
    std::vector<int> visible;
    const char *wanted = std::getenv("CUDA_VISIBLE_DEVICES");
    std::istringstream names(wanted != nullptr ? wanted : "0,1");
    for (std::string name; std::getline(names, name, ',');) {
        for (int gpu = 0; gpu < gpus && gpu < kMostGpus; ++gpu) {
            if (name == std::to_string(gpu) || name == text_of_uuid(gpu)) visible.push_back(gpu);
        }
    }
    return visible;
}

const std::vector<int> &visible_gpus() {
    static const std::vector<int> found = find_visible();
    return found;
}

}  // namespace

int num_visible_gpus() {
    return static_cast<int>(visible_gpus().size());
}

int visible_gpu(int ordinal) {
    return visible_gpus().at(ordinal);
}

std::array<unsigned char, 16> uuid_of(int gpu) {
    std::array<unsigned char, 16> uuid;
    uuid.fill(0xAB);
    uuid.back() = static_cast<unsigned char>(gpu);
    return uuid;
}

cuda::ContextHandle context_of(int gpu) {
    return reinterpret_cast<cuda::ContextHandle>(&contexts_of[gpu]);
}

bool push_context(cuda::ContextHandle context) {
    for (int gpu = 0; gpu < kMostGpus; ++gpu) {
        if (context != context_of(gpu)) continue;
        current.push_back(gpu);
        return true;
    }
    return false;
}

cuda::ContextHandle pop_context() {
    const int gpu = current_gpu();
    if (gpu < 0) return nullptr;
    current.pop_back();
    return context_of(gpu);
}

int current_gpu() {
    return current.empty() ? -1 : current.back();
}

}  // namespace fdcache::stand_in
