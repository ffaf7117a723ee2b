// Unpackers compiled for the generic level.
#include "linear/unpack_body.h"

namespace minference {

UnpackBlocksFn unpacker_generic(WeightFormat format) { return body_of(format); }

}  // namespace minference
