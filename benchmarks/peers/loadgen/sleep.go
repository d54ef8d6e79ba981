package main

import (
	"syscall"
	"time"
)

// sleepUntil sleeps in the kernel: the runtime's own timers are exact to a millisecond only while it is idle.
func sleepUntil(due time.Time) {
	for {
		left := time.Until(due)
		if left <= 0 {
			return
		}
		rest := syscall.NsecToTimespec(left.Nanoseconds())
		_ = syscall.Nanosleep(&rest, nil)
	}
}
