// Unpackers compiled for the avx512 level.
#include "linear/unpack_body.h"

namespace minference {

UnpackBlocksFn unpacker_avx512(WeightFormat format) { return body_of(format); }

}  // namespace minference
