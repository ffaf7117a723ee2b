#include "minference/version.h"

namespace minference {

const char* version() { return MINFERENCE_VERSION; }

}  // namespace minference
