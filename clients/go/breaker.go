package leasehold

import (
	"sync"
	"time"
)

// breaker allows calls while the agent gives signs of life, and stops them for a pause after so many failures in a row.
// After the pause one call at a time is let through on trial.
type breaker struct {
	failures int
	pause    time.Duration

	mutex         sync.Mutex
	failuresInRow int
	openUntil     time.Time
}

// mayCall reports whether to call the agent now. After the pause one caller gets true, and makes the trial call.
func (b *breaker) mayCall(now time.Time) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.failuresInRow < b.failures {
		return true
	}
	if now.Before(b.openUntil) {
		return false
	}
	b.openUntil = now.Add(b.pause)
	return true
}

// succeeded records that the agent answered, which closes the breaker.
func (b *breaker) succeeded() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.failuresInRow = 0
}

// failed records that the agent gave no sign of life.
func (b *breaker) failed(now time.Time) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.failuresInRow++
	if b.failuresInRow >= b.failures {
		b.openUntil = now.Add(b.pause)
	}
}
