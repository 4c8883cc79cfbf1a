package edgelimit

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Some charges end with the response: what is in flight leaves, and on_status
// keeps or gives back what it charged. The response's final status is known when
// its header is written, which is also the moment for headers of our own: a 103
// before it must not carry them.

// serveSettled calls next for a request whose charges end with the response, or
// whose response gets headers.
func (h *Handler) serveSettled(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, charges []charge, quota *quota) error {
	s := &settler{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, r: r, charges: charges, quota: quota, now: h.now}
	defer func() {
		s.settle(0) // a panic: no answer at all
		for i := range charges {
			if _, ok := charges[i].budget.(*InFlight); ok {
				charges[i].giveBack(0)
				charges[i].giveBackShared()
			}
		}
	}()
	err := next.ServeHTTP(s, r)
	s.settle(statusOf(err))
	return err
}

// statusOf is the status that the end of a handler chain stands for: 200 where
// nothing was written, that of an error, or 500.
func statusOf(err error) int {
	if err == nil {
		return http.StatusOK
	}
	var handlerErr caddyhttp.HandlerError
	if errors.As(err, &handlerErr) && handlerErr.StatusCode != 0 {
		return handlerErr.StatusCode
	}
	return http.StatusInternalServerError
}

// needsSettling says whether charges end with the response.
func needsSettling(charges []charge) bool {
	for i := range charges {
		switch b := charges[i].budget.(type) {
		case *InFlight:
			return true
		case *Limit:
			if b.OnStatus != nil {
				return true
			}
		}
	}
	return false
}

// settler is a response writer that settles charges when the final header is
// written.
type settler struct {
	*caddyhttp.ResponseWriterWrapper
	r       *http.Request
	charges []charge
	quota   *quota
	now     func() int64
	settled bool
}

// settle ends the charges once.
func (s *settler) settle(status int) {
	if s.settled {
		return
	}
	s.settled = true
	if s.quota != nil {
		s.quota.write(s.Header())
	}
	cancelled := s.r.Context().Err() != nil
	now := s.now()
	for _, c := range s.charges {
		if limit, ok := c.budget.(*Limit); ok && limit.OnStatus != nil && !c.skip {
			limit.settle(c, status, cancelled, now)
		}
	}
}

// WriteHeader settles on a final status. 101 is final too.
func (s *settler) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		s.settle(status)
	}
	s.ResponseWriter.WriteHeader(status)
}

func (s *settler) Write(p []byte) (int, error) {
	s.settle(http.StatusOK)
	return s.ResponseWriter.Write(p)
}

func (s *settler) ReadFrom(r io.Reader) (int64, error) {
	s.settle(http.StatusOK)
	return s.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError is what http.ResponseController calls. A flush writes the header.
func (s *settler) FlushError() error {
	s.settle(http.StatusOK)
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// Hijack ends what is known of the response.
func (s *settler) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	s.settle(http.StatusSwitchingProtocols)
	return http.NewResponseController(s.ResponseWriter).Hijack()
}

// Interface guards.
var (
	_ http.ResponseWriter = (*settler)(nil)
	_ io.ReaderFrom       = (*settler)(nil)
	_ http.Hijacker       = (*settler)(nil)
)
