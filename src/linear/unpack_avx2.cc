// Unpackers compiled for the avx2 level.
#include "linear/unpack_body.h"

namespace minference {

UnpackBlocksFn unpacker_avx2(WeightFormat format) { return body_of(format); }

}  // namespace minference
