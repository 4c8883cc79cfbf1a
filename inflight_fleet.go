package edgelimit

import "context"

// The places of an in_flight that a store keeps end by themselves, so that a
// crash does not hold them for ever. So requests that run are told to it again
// and again, and those that ended while it could not be told, later.

// runningCharge is a request in flight.
type runningCharge struct {
	StoreCharge
	told bool // the store may know of it
}

// enter remembers a request in flight, so that it can be renewed.
func (f *fleet) enter(c StoreCharge, told bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running[c.ID] = runningCharge{c, told}
}

// exit tells the store that a request in flight has ended, if it knows of it.
func (f *fleet) exit(c StoreCharge) {
	f.mu.Lock()
	told := f.running[c.ID].told
	delete(f.running, c.ID)
	f.mu.Unlock()
	if !told {
		return
	}
	err := f.call(f.timeout, func(ctx context.Context, conn StoreConn) error {
		return conn.GiveBack(ctx, []StoreCharge{c})
	})
	if err != nil {
		f.lose(c)
	}
}

// lose remembers what the store must still be told. Beyond a bound it is left to
// the entry's own end.
func (f *fleet) lose(charges ...StoreCharge) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = append(f.lost, charges[:min(len(charges), maxLost-len(f.lost))]...)
}

// tellLost tells the store what it could not be told before.
func (f *fleet) tellLost() {
	f.mu.Lock()
	lost := f.lost
	f.lost = nil
	f.mu.Unlock()
	f.lose(f.inBatches(lost, StoreConn.GiveBack)...)
}

// renew shows the store which requests still run: it may have forgotten them.
func (f *fleet) renew() {
	f.mu.Lock()
	running := make([]StoreCharge, 0, len(f.running))
	for id, c := range f.running {
		running = append(running, c.StoreCharge)
		c.told = true
		f.running[id] = c
	}
	f.mu.Unlock()
	f.inBatches(running, StoreConn.Renew)
}

// inBatches tells the store of many charges, and returns those that it could not
// be told of.
func (f *fleet) inBatches(charges []StoreCharge, tell func(StoreConn, context.Context, []StoreCharge) error) (untold []StoreCharge) {
	const batch = 100
	for len(charges) > 0 {
		n := min(batch, len(charges))
		err := f.call(beatTimeout, func(ctx context.Context, conn StoreConn) error { return tell(conn, ctx, charges[:n]) })
		if err != nil {
			return charges
		}
		charges = charges[n:]
	}
	return nil
}
