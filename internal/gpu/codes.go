package gpu

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

// ofTheCall are the results of the driver by which it refuses a question and says nothing
// about work that runs: cuda.h gives each a reason that lies in the call or in a stream
// that is being captured. Every other error of a wait loses the device: those that leave
// "the process in an inconsistent state" (226, 700, 702, 714 to 719, 721, 911) or a
// context that "cannot be used anymore" (709, 710), those of hardware (214, 220) and of
// processes that owned the work (805 to 810), and whatever is not known here, because
// then nobody knows what runs.
var ofTheCall = map[int]string{
	2:   "out of memory for the call",
	800: "the call is not permitted now",
	801: "the call is not supported here",
	900: "not permitted while the stream is being captured",
	901: "the capture on the stream has been invalidated",
	902: "two captures would have been merged",
	903: "the capture was not begun on this stream",
	904: "the capture has a fork that was not joined",
	905: "a dependency would cross the border of the capture",
	906: "a dependency on the legacy stream, which is being captured",
	907: "the event was last recorded in a capture",
	908: "the capture is another thread's",
	909: "the time of the call has run out",
}

// waitFailed is the error of a wait that the driver has answered with a code.
func waitFailed(code int, call, name string) error {
	if why, ok := ofTheCall[code]; ok {
		return fmt.Errorf("%w: %s: %s (CUDA error %d: %s)", engine.ErrUnanswered, call, name, code, why)
	}
	return fmt.Errorf("%w: waiting for a copy: %s: %s (CUDA error %d)", base.ErrFault, call, name, code)
}
