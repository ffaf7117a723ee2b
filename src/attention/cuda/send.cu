#include "attention/cuda/send.h"

#include <algorithm>
#include <cstring>

#include "attention/cuda/check.h"

namespace minference::cuda {
namespace {

constexpr int kThreads = 128;

struct Parcel {
  std::uint32_t words[kSendBytes / 4];
};

__global__ void write(const __grid_constant__ Parcel parcel, std::uint32_t* to, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = parcel.words[i];
}

}  // namespace

void send(const void* from, std::int64_t bytes, void* to, cudaStream_t stream) {
  for (std::int64_t begin = 0; begin < bytes; begin += kSendBytes) {
    const std::int64_t part = std::min(kSendBytes, bytes - begin);
    Parcel parcel;
    std::memcpy(parcel.words, static_cast<const char*>(from) + begin,
                static_cast<std::size_t>(part));
    write<<<1, kThreads, 0, stream>>>(
        parcel, reinterpret_cast<std::uint32_t*>(static_cast<char*>(to) + begin),
        static_cast<int>(part / 4));
    check(cudaGetLastError(), "sending a call's lengths or index to the device");
  }
}

}  // namespace minference::cuda
