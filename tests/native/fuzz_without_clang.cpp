// Runs a fuzz target without a fuzzer: on files, and on random inputs, always the same ones.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size);

namespace {

void run(const std::vector<std::uint8_t> &input) {
    LLVMFuzzerTestOneInput(input.data(), input.size());
}

void run_random_inputs(unsigned long count) {
    std::mt19937 random(1);
    for (unsigned long i = 0; i < count; ++i) {
        std::vector<std::uint8_t> input(random() % 600);
        for (auto &byte : input) byte = static_cast<std::uint8_t>(random());
        run(input);
    }
}

}  // namespace

// Arguments: a number of random inputs, then files and folders.
int main(int count, char **arguments) {
    namespace fs = std::filesystem;
    if (count < 2) {
        std::fputs("usage: a number of random inputs, then files and folders of inputs\n", stderr);
        return EXIT_FAILURE;
    }
    std::vector<fs::path> files;
    for (int i = 2; i < count; ++i) {
        if (fs::is_directory(arguments[i]))
            for (const auto &each : fs::directory_iterator(arguments[i])) files.push_back(each.path());
        else
            files.emplace_back(arguments[i]);
    }
    for (const fs::path &file : files) {
        std::ifstream in(file, std::ios::binary);
        if (!in) {
            std::fprintf(stderr, "cannot read %s\n", file.c_str());
            return EXIT_FAILURE;
        }
        run({std::istreambuf_iterator<char>(in), {}});
    }
    run_random_inputs(std::strtoul(arguments[1], nullptr, 10));
    std::printf("%zu inputs of files and %s random ones\n", files.size(), arguments[1]);
    return EXIT_SUCCESS;
}
