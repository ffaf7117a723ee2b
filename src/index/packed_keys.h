// PackedKeys: the keys of whole KV heads in tile layout, packed once for all query heads that read
// them.
//
// With a stride s the keys are packed by phase: cell c holds keys c * s ... c * s + s - 1, and a tile
// 64 cells, first their keys of phase 0, then those of phase 1, ... A stride of 1 is plain order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "attention/cpu/kernel_table.h"
#include "attention/visible_keys.h"
#include "core/aligned_buffer.h"
#include "core/parallel.h"
#include "minference/attention.h"

namespace minference {

class PackedKeys {
 public:
  // Of each sequence, the keys that its last `last_rows` query rows may see. Keeps references to its
  // arguments.
  PackedKeys(const cpu::KernelTable& kernels, const AttentionInput& input,
             const AttentionParams& params, std::int64_t last_rows, std::int64_t stride = 1);

  const std::vector<SequenceGeometry>& geometry() const { return geometry_; }  // [batch]

  // Calls work(heads) for the query heads whose entry of wanted [batch * q_heads] is not 0 and whose
  // sequence has rows and keys, in groups whose packed keys exist during the call: all at once
  // unless they need more than 1 GiB. Heads are numbered sequence * q_heads + head, ascending.
  void in_waves(std::span<const std::uint8_t> wanted,
                const std::function<void(std::span<const std::int64_t> heads)>& work);

  // The same head by head, in parallel: calls body(b, h, worker, thread), `thread` as in
  // parallel_for() and each with one Worker(kernels, input, params) of its own.
  template <class Worker, class Body>
  void for_each_head(std::span<const std::uint8_t> wanted, Body&& body) {
    std::vector<std::optional<Worker>> workers(resolve_threads(params_.threads));
    in_waves(wanted, [&](std::span<const std::int64_t> heads) {
      parallel_for(static_cast<std::int64_t>(heads.size()), params_.threads,
                   [&](std::int64_t i, int thread) {
                     if (!workers[thread]) workers[thread].emplace(kernels_, input_, params_);
                     body(heads[i] / input_.q.heads(), heads[i] % input_.q.heads(),
                          *workers[thread], thread);
                   });
    });
  }

  // Key `key` on, a multiple of 32, as query head `head` of sequence b reads it; stride 1.
  const std::byte* keys(std::int64_t b, std::int64_t h, std::int64_t key) const {
    return packed(b, h).data() + key * key_bytes_;
  }
  // 64 cells of one phase.
  const std::byte* phase(std::int64_t b, std::int64_t h, std::int64_t tile,
                         std::int64_t phase) const {
    return packed(b, h).data() + (tile * stride_ + phase) * cpu::kTileKeys * key_bytes_;
  }
  // Distance of granules of keys, in bytes.
  std::int64_t granule_bytes() const { return cpu::kKeyGranule * key_bytes_; }

 private:
  std::int64_t cells(std::int64_t tokens) const { return (tokens + stride_ - 1) / stride_; }
  const AlignedBuffer<std::byte>& packed(std::int64_t b, std::int64_t h) const {
    return packed_[b * input_.k.heads() + h / group_];
  }
  void pack_wave(std::int64_t begin, std::int64_t end, std::span<const std::uint8_t> needed);
  void pack(std::int64_t head, std::int64_t tile);

  const cpu::KernelTable& kernels_;
  const AttentionInput& input_;
  const AttentionParams& params_;
  std::int64_t last_rows_;
  std::int64_t stride_;
  std::int64_t group_;  // query heads of a KV head
  std::int64_t dim_;    // padded
  std::int64_t key_bytes_;
  std::vector<SequenceGeometry> geometry_;        // [batch]
  std::vector<AlignedBuffer<std::byte>> packed_;  // [batch][kv_heads]
};

}  // namespace minference
