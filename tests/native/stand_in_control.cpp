// The interface of the stand-in driver for tests in Python: faults, queries, and work on its streams.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "native/stand_in_faults.hpp"
#include "native/stand_in_gpus.hpp"
#include "native/stand_in_holdings.hpp"
#include "native/stand_in_ipc.hpp"
#include "native/stand_in_kernels.hpp"
#include "native/stand_in_memory.hpp"
#include "native/stand_in_streams.hpp"

using namespace fdcache;

extern "C" {

void stand_in_fail(const char *call, int after, int code, int every) {
    stand_in::fail({call, after, code, every});
}

int stand_in_recover() {
    stand_in::synchronize_all();  // work lost with a GPU does not run later
    return stand_in::recover();
}

void stand_in_delay(unsigned call, unsigned copy) {
    stand_in::set_delays({call, copy});
}

void stand_in_capture(const void *stream) {
    stand_in::captured = stream;
}

void stand_in_disown(const void *stream) {
    stand_in::foreign = stream;
}

// --- holdings, and releases without a holding

int stand_in_events() {
    return static_cast<int>(stand_in::events.held());
}

int stand_in_registered() {
    return static_cast<int>(stand_in::registered.held());
}

int stand_in_opened() {
    return static_cast<int>(stand_in::opened.held());
}

int stand_in_contexts() {
    return stand_in::contexts;
}

int stand_in_pushed() {
    return stand_in::pushed;
}

int stand_in_unknown() {
    return static_cast<int>(stand_in::events.unknown() + stand_in::registered.unknown());
}

// --- the work of an engine

void stand_in_know(const void *data, std::size_t nbytes, int gpu) {
    stand_in::make_known(data, nbytes, gpu);
}

void stand_in_share(const void *data, int descriptor) {
    stand_in::share(data, descriptor);
}

int stand_in_owner(const void *data) {
    return stand_in::owner_of(data);
}

void stand_in_forget(const void *data) {
    stand_in::forget(data);
}

int stand_in_visible() {
    return stand_in::num_visible_gpus();
}

int stand_in_gpu(int ordinal) {
    return stand_in::visible_gpu(ordinal);
}

void *stand_in_stream(int gpu) {
    return std::make_unique<stand_in::Stream>(gpu).release();
}

// Returns when the stream is idle.
void stand_in_end_stream(stand_in::Stream *stream) {
    const std::unique_ptr<stand_in::Stream> owned(stream);
}

void stand_in_synchronize(stand_in::Stream *stream) {
    stream->mark()->wait();
}

void stand_in_synchronize_all() {
    stand_in::synchronize_all();
}

// Rows of `width` bytes, `pitch` bytes apart.
void stand_in_copy(stand_in::Stream *stream, std::uint8_t *to, std::size_t to_pitch, const std::uint8_t *from,
                   std::size_t from_pitch, std::size_t width, std::size_t height) {
    stream->copy([=] {
        for (std::size_t row = 0; row < height; ++row) {
            std::memcpy(to + row * to_pitch, from + row * from_pitch, width);
        }
    });
}

void stand_in_pause(stand_in::Stream *stream, unsigned microseconds) {
    stream->call([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

// Loses the GPU when the stream gets there.
void stand_in_trap(stand_in::Stream *stream) {
    stream->call([] { stand_in::lose(stand_in::kLost); });
}

// In the order of `cuda::Kernels`.
void *stand_in_kernel(int gpu, unsigned index) {
    const cuda::Kernels made = stand_in::kernels(gpu);
    return std::array{made.copy_in, made.copy_out, made.sum, made.copy_words, made.read_peer}.at(index);
}

}  // extern "C"
